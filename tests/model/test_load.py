"""Where a model may come from, and what is said when it cannot be read."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    OpenAIGPTConfig,
    PreTrainedTokenizerFast,
)

import tiny
from architectures import VOCAB, build, prompt, skip_lost_prefix
from at_once import twice_at_once
from draftsmith import builtin
from draftsmith.core.draft import Draft
from draftsmith.core.target import Needs
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError, UnsupportedError
from draftsmith.model.changes import hooks
from draftsmith.model.load import load, read_tokenizer
from draftsmith.model.measure import pass_cost
from draftsmith.model.runner import Runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build("llama").to(torch.bfloat16).save_pretrained(path)
    words = {f"w{i}": i for i in range(VOCAB)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(path)
    return path


def test_a_tokenizer_with_more_special_tokens_that_transformers_5_saved(tmp_path: Path) -> None:
    made = copy.deepcopy(tiny.tokenizer())
    made.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    made.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("additional_special_tokens", None)
    as_5 = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|tool|>"]}
    path.write_text(json.dumps(settings | as_5))
    found = read_tokenizer(str(tmp_path), {})
    assert found("<|tool|>x")["input_ids"] == made("<|tool|>x")["input_ids"]
    assert found.decode(made("<|tool|>x")["input_ids"], skip_special_tokens=True) == "x"


def test_a_folder(folder: Path) -> None:
    loaded = load(str(folder), dtype="auto")
    assert loaded.name == str(folder)
    assert loaded.dtype == torch.bfloat16
    assert loaded.device == torch.device("cpu")
    assert loaded.context_length == 256
    assert loaded.vocab_size == len(loaded.tokenizer) == VOCAB
    assert loaded.capabilities.shape == "tree"
    assert not loaded.model.training
    assert load(folder, dtype="float32", device="cpu").dtype == torch.float32


@pytest.mark.parametrize("build_name", ["from_pretrained", "from_config"])
def test_threads_build_one_model_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, build_name: str
) -> None:
    """transformers changes torch for the whole process meanwhile."""
    model = AutoModelForCausalLM
    _, met = twice_at_once(monkeypatch, model, build_name, lambda: load(folder))
    assert not met


def test_a_folder_below_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(load(f"~/{folder.name}").tokenizer) == VOCAB
    with pytest.raises(LoadError, match="there is no folder ~nobody-of-this-name/model"):
        load("~nobody-of-this-name/model")


def test_a_name_that_is_too_long_for_a_file_is_refused() -> None:
    with pytest.raises(LoadError, match="no such folder"):
        load("x" * 5_000)


def test_a_tokenizer_of_ones_own(folder: Path, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="name another one as tokenizer"):
        load(tmp_path)
    assert len(load(tmp_path, tokenizer=folder).tokenizer) == VOCAB
    own = tiny.tokenizer()
    assert load(tmp_path, tokenizer=own).tokenizer is own


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no folder"):
        load("./no/such/folder")
    with pytest.raises(LoadError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(LoadError, match=r"safetensors weights.*pickle"):
        load(tmp_path)
    with pytest.raises(LoadError, match="is a file"):
        load(folder / "config.json")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match="configuration"):
        load(tmp_path)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(LoadError, match=r"the weights in .* cannot be read: .*incomplete"):
        load(tmp_path)


def test_what_is_known_here_is_not_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("draftsmith.model.load.AutoConfig.from_pretrained", ask)
    monkeypatch.setattr("draftsmith.model.load.AutoTokenizer.from_pretrained", ask)
    for name in ("edit7m", "edit-7n", "Edit-7m"):
        with pytest.raises(LoadError, match=r"did you mean 'edit-7m'\?"):
            load(name)
        with pytest.raises(LoadError, match=r"did you mean 'edit-7m'\?"):
            load(build("llama"), tokenizer=name)
    for path in ("./no/such/tokenizer", "/no/such", "no/such/tokenizer"):
        with pytest.raises(LoadError, match="there is no folder"):
            load(build("llama"), tokenizer=path)
    for name in ("gpt2", "distilgpt2", "someone/edit-7m"):
        assert builtin.resolve(name) == name


def test_no_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("We couldn't connect to the hub\nand more\nlines")

    monkeypatch.setattr("draftsmith.model.load.AutoConfig.from_pretrained", offline)
    with pytest.raises(LoadError, match="check the name, the network") as caught:
        load("someone/some-model")
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_models_that_do_not_decode_alone() -> None:
    t5 = CONFIG_MAPPING["t5"](vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        load(AutoModelForSeq2SeqLM.from_config(t5))
    bert = CONFIG_MAPPING["bert"](
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    with pytest.raises(UnsupportedError, match="encoder"):
        load(AutoModelForCausalLM.from_config(bert))
    with pytest.raises(UnsupportedError, match="head"):
        load(AutoModel.from_config(build("llama").config))
    with pytest.raises(LoadError, match="hub id"):
        load(3)


def test_models_without_weights_are_refused() -> None:
    whole = tiny.model()
    with torch.device("meta"):
        empty = type(whole)(whole.config).eval()
    with pytest.raises(LoadError, match=r"no weights in .*embed_tokens: it is on the meta"):
        load(empty)
    part = copy.deepcopy(whole)
    part.model.layers[1].to("meta")
    with pytest.raises(LoadError, match=r"no weights in model.layers.1.self_attn.q_proj"):
        load(part)


def test_options_that_cannot_apply_to_a_live_model() -> None:
    with pytest.raises(OptionError, match="dtype, device"):
        load(build("llama"), dtype="float32", device="cpu")
    with pytest.raises(OptionError, match=r"eval\(\)"):
        load(build("llama").train())


def test_the_users_model_is_as_before() -> None:
    model = build("gemma3_text")
    before, attributes = model.config.to_dict(), set(vars(model))
    implementation = model.config._attn_implementation
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    runner = Runner(load(model))
    row = runner.open(prompt(12), Needs(hidden_layers=(1,), attention_heads=((0, 1),)))
    runner.prefill(row)
    runner.forward([row], [Draft.chain([5, 6], "test")])
    assert model.config.to_dict() == before
    assert set(vars(model)) == attributes
    assert model.config._attn_implementation == implementation
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
def test_learned_virtual_tokens_decode_as_with_generate(kind: str) -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = peft.get_peft_model(build("llama"), config).eval()
        skip_lost_prefix(model)
        loaded = load(model)
        assert loaded.capabilities.shape == "plain"
        ids = torch.tensor([prompt(9)])
        expected = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)[0, 9:]
        assert Engine(loaded).generate(prompt(9), max_new_tokens=4).tokens == expected.tolist()


def test_an_adapter_that_looks_for_tokens_in_its_passes_is_refused() -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[40, 41]
        )
        model = peft.get_peft_model(build("llama"), config).eval()
    with pytest.raises(UnsupportedError, match="the adapter's invocation tokens"):
        load(model)


def test_a_folder_with_an_adapter_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="is an adapter: load it with transformers or PEFT"):
        load(tmp_path)


def test_a_device_map(folder: Path) -> None:
    names = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    parts = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    loaded = load(folder, device_map=parts)
    assert loaded.capabilities.shape == "tree"
    assert loaded.device == torch.device("cpu")


def test_costs_are_measured_by_width(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("draftsmith.model.measure.perf_counter", lambda: 0.5 * next(ticks))
    costs = pass_cost(load(build("llama")), widths=(1, 4, 600), context=16, repeats=2)
    assert list(costs) == [1, 4]  # of 256 positions
    assert all(seconds == 0.5 for seconds in costs.values())
    assert list(pass_cost(load(build("mamba")), widths=(1, 4), context=9, repeats=1)) == [1]


@pytest.mark.parametrize(("options", "named"), [
    ({"device": "cpu", "device_map": "auto"}, "choose one"),
    ({"dtype": "floaty"}, "unknown dtype 'floaty'"),
    ({"dtype": "int8"}, "'int8'"),
    ({"device": "toaster"}, "'toaster'"),
    ({"device": "cuda:99"}, "'cuda:99'"),
])  # fmt: skip
def test_impossible_options_are_named(options: dict[str, str], named: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=named):
        load(str(tmp_path), **options)


def test_built_in_models_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("edit-1m").name == "edit-1m"  # as it was asked for


CHANGED = {
    "sizes": ({"vocab_size": VOCAB + 8}, "other sizes than config.json says"),
    "layers": ({"num_hidden_layers": 9}, "lacks .* of the model's tensors, such as"),
    "activation": ({"hidden_act": "nope"}, "KeyError: 'nope'"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_weights_that_do_not_fit_the_configuration_are_refused(
    folder: Path, tmp_path: Path, case: str
) -> None:
    """Weights that are missing would be random."""
    changes, said = CHANGED[case]
    new = shutil.copytree(folder, tmp_path / "new")
    config = json.loads((new / "config.json").read_text(encoding="utf-8"))
    (new / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(LoadError, match=said):
        load(new)


def test_weights_of_a_wrapped_model_are_refused(folder: Path, tmp_path: Path) -> None:
    new = shutil.copytree(folder, tmp_path / "new")
    weights = load_file(new / "model.safetensors")
    save_file({f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
              new / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(LoadError, match="not one that torch"):
        load(new)


@pytest.mark.parametrize("changed", ["hook", "weight", "blocks", "buffer", "activation", "forward"])
def test_a_prefix_is_read_again_after_the_model_has_changed(changed: str) -> None:
    model, ids = build("llama"), prompt(60)
    engine = Engine(load(model), drafter="none")
    engine.generate(ids, max_new_tokens=8)
    layers = model.model.layers
    if changed == "hook":
        layers[0].register_forward_hook(lambda *given: given[2] * 1.5)
    elif changed == "weight":
        weight = layers[0].self_attn.q_proj.weight
        layers[0].self_attn.q_proj.weight = torch.nn.Parameter(weight.detach() * 2)
    elif changed == "blocks":
        layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp
    elif changed == "buffer":
        model.model.rotary_emb.inv_freq.mul_(1.01)
    elif changed == "activation":
        layers[0].mlp.act_fn = torch.nn.ReLU()
    else:
        own = layers[0].mlp.forward
        layers[0].mlp.forward = lambda x: 1.5 * own(x)
    fresh = Engine(load(model), drafter="none").generate(ids, max_new_tokens=8)
    found = engine.generate(ids, max_new_tokens=8)
    assert (found.tokens, found.stats.reused_tokens) == (fresh.tokens, 0)
    assert engine.generate(ids, max_new_tokens=8).stats.reused_tokens > 0


def test_blocks_may_return_lists() -> None:
    config = OpenAIGPTConfig(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = prompt(20)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, 20:]
    assert Engine(load(model)).generate(ids, max_new_tokens=12).tokens == expected.tolist()


def test_our_own_hooks_are_not_the_users() -> None:
    """Another thread may look while a pass is recorded."""
    loaded = load(build("llama"))
    before, runner = hooks(loaded.model), Runner(loaded)
    row, found = runner.open(prompt(20), Needs(hidden_layers=(1,))), list[Any]()
    own = loaded.model.lm_head.forward
    loaded.model.lm_head.forward = lambda x: (found.append({*hooks(loaded.model)}), own(x))[1]
    runner.forward([row], [Draft()])
    assert found == [{*before}]


def test_a_tokenizer_of_mistral_common_is_not_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5 prefers it where it is installed, and it has no chat template."""
    real = AutoTokenizer.from_pretrained

    def read(source: str, **options: Any) -> Any:
        return real(source, **options) if options.pop("mistral_format", True) is False else object()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", read)
    assert read_tokenizer(str(folder), {}).get_added_vocab() is not None
