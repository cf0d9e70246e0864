"""EAGLE-3 on tiny random heads: what it drafts, what it reads, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import same_answers
from safetensors.torch import load_file

from architectures import VOCAB, build, prompt
from draftsmith.core.draft import ROOT, Draft
from draftsmith.core.drafter import Drafter
from draftsmith.drafters.eagle3 import Eagle3
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError, UnsupportedError
from draftsmith.integrations.transformers import accelerate
from draftsmith.lab.train.unpickle import unpickle
from draftsmith.testing import check_drafter
from heads import Plainly, random_head, save
from tiers import slow_after

LAYERS = (1, 3, 4)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def target(name: str = "llama") -> Any:
    return build(name, num_hidden_layers=5)


class Watched(Drafter):
    """Another drafter, and what it drafted after which ids."""

    name = "watched"

    def __init__(self, inner: Drafter, found: list[tuple[list[int], Draft]] | None = None) -> None:
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "found", [] if found is None else found)

    def bind(self, model: Any) -> Drafter:
        return Watched(self.inner.bind(model), self.found)

    def needs_of(self, model: Any) -> Any:
        return self.inner.needs_of(model)

    def open(self, ctx: Any) -> Any:
        return self.inner.open(ctx)

    def draft(self, states: Any, contexts: Any) -> list[Draft]:
        drafts = self.inner.draft(states, contexts)
        self.found += [(list(ctx.ids), d) for ctx, d in zip(contexts, drafts, strict=True)]
        return drafts


def paths(draft: Draft) -> Iterator[tuple[list[int], int, float]]:
    """(path to the parent, token, probability) of each node."""
    above: dict[int, list[int]] = {ROOT: []}
    nodes = zip(draft.tokens, draft.parents, draft.chances or (), strict=True)
    for node, (token, parent, prob) in enumerate(nodes):
        above[node] = [*above[parent], token]
        yield above[parent], token, prob


def check_drafts(
    model: Any, plainly: Plainly, found: Sequence[tuple[list[int], Draft]], layers: Sequence[int]
) -> int:
    """Each node has the probability that the definition gives it; returns how many there were."""
    nodes = 0
    for ids, draft in found:
        with torch.inference_mode():
            states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        g = plainly.fuse([states[layer][0] for layer in layers])
        for path, token, prob in paths(draft):
            known, probs = plainly.next(ids, g, path)
            wanted = probs[known == token]
            torch.testing.assert_close(torch.tensor([prob]), wanted, rtol=1e-3, atol=1e-4)
            if not path and token == draft.tokens[0]:
                assert prob == pytest.approx(float(probs.max()), rel=1e-3)
            nodes += 1
    return nodes


SHAPES: list[dict[str, Any]] = [
    {"flat": True},
    {"flat": False, "norm_before_fc": True, "norm_before_residual": True, "layers": 2},
    {"flat": False, "q_norm": True, "norm_output": True},
    {"flat": True, "norm_before_residual": True},
    {"flat": False, "fc_norm": True, "norm_output": True, "known": VOCAB},
]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", slow_after(3, SHAPES), ids=str)
def test_drafts_are_those_of_the_definition(
    name: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    """Of ragged prompts that share their passes; a layer or a position amiss changes them all."""
    model, options = target(name), dict(shape)
    flat, known = options.pop("flat"), options.pop("known", 40)
    flags = {name: True for name in FLAGS if options.get(name)}
    tensors = random_head(64, VOCAB, known, **options)
    folder = save(tmp_path / "head", tensors, flat=flat, layer_ids=LAYERS, **flags)
    watched = Watched(Eagle3(folder, depth=3))
    prompts = [prompt(n, seed=n) for n in (3, 90, 17)]
    engine = Engine.from_pretrained(model)
    same_answers(engine, prompts, watched, max_new_tokens=12, budget=6)
    assert check_drafts(model, Plainly(tensors, flags), watched.found, LAYERS) > 60


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save(tmp_path / "head", random_head(64, VOCAB, 40), layer_ids=LAYERS)


@pytest.mark.parametrize("sample", [False, True])
def test_contract(sample: bool, tmp_path: Path) -> None:
    """In float64, so that the distribution of sampled chains can be enumerated."""
    tensors = random_head(4, 11, 3, reads=2, dtype=torch.float64, seed=2)
    tensors["d2t"] = torch.tensor([0, 0, 0] if sample else [1, 3, 7])
    head = save(tmp_path / "head", tensors, layer_ids=(1, 2))
    check_drafter(Eagle3(head, depth=2, sample=sample), length=6)


@pytest.mark.parametrize("name", slow_after(1, ["llama", "deepseek_v3", "falcon"]))
def test_nothing_is_lost(name: str, folder: str) -> None:
    """Greedy and sampled, several answers together, whatever drafts the target can verify."""
    engine = Engine.from_pretrained(target(name))
    prompts = [prompt(n, seed=n) for n in (1, 90, 18)]
    [plain] = engine.generate(prompts[:1], drafter="none", max_new_tokens=1)
    for options in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 4}):
        options |= {"max_new_tokens": 14, "budget": 6}
        found = same_answers(engine, prompts, f"eagle3(model={folder})", **options)
        assert sum(one.stats.drafted for one in found) > 40
        assert found[0].notices == plain.notices


@pytest.mark.slow
def test_a_row_that_is_kept_serves_a_head(folder: str) -> None:
    """A prompt that begins like an answered one, and one that parts from it within."""
    engine, drafter = Engine.from_pretrained(target()), Watched(Eagle3(folder))
    plainly = Plainly(random_head(64, VOCAB, 40), {})
    first = prompt(60, seed=1)
    [answer] = engine.generate([first], max_new_tokens=20, drafter=drafter, budget=6)
    for again in ([*first, *answer.tokens, 5, 6], [*first[:40], 9, 8, 7]):
        drafter.found.clear()
        [found] = same_answers(engine, [again], drafter, max_new_tokens=16, budget=6)
        assert found.stats.reused_tokens >= 39
        assert check_drafts(engine.model.model, plainly, drafter.found[:3], LAYERS) > 12


@pytest.mark.parametrize("sample", [False, True])
def test_a_head_that_overflows_is_reported(sample: bool, tmp_path: Path) -> None:
    tensors = random_head(64, VOCAB, 40)
    tensors["norm.weight"].fill_(torch.inf)
    head = Eagle3(save(tmp_path, tensors, layer_ids=(1,) * 3), sample=sample)
    engine, options = Engine.from_pretrained(target()), {"max_new_tokens": 9, "seed": 1}
    found = engine.generate(prompt(9), drafter=head, budget=6, temperature=sample * 1.0, **options)
    assert found.stats.drafter_failures == 1
    assert any("the drafter failed" in notice for notice in found.notices)


def test_chats_and_answers_that_are_broken_off(folder: str) -> None:
    from tiny import model, tokenizer

    head = random_head(64, len(tokenizer()), 60)
    other = save(Path(folder).parent / "other", head, layer_ids=(1,) * 3)
    engine = Engine.from_pretrained(model(), tokenizer=tokenizer())
    options = {"max_new_tokens": 16, "budget": 6}
    chats = [engine.chat(drafter=d, **options) for d in ("none", f"eagle3(model={other})")]
    for message in ("hello world", "the quick fox", "a test"):
        plain, drafted = [chat.send(message) for chat in chats]
        assert plain.tokens == drafted.tokens
        assert drafted.stats.drafted > 10
    stream = engine.stream("hello", drafter=f"eagle3(model={other})", **options)
    next(iter(stream))
    stream.close()
    same_answers(engine, ["hello"], f"eagle3(model={other})", **options)


@pytest.mark.slow
def test_exact_passes_read_a_head_beside_them(folder: str) -> None:
    """Half precision, where the width of a pass decides its rounding unless passes are exact."""
    engine = Engine.from_pretrained(target().to(torch.bfloat16), exact=True)
    prompts = [prompt(n, seed=n) for n in (12, 40)]
    options = {"max_new_tokens": 20, "budget": 6}
    plain = [engine.generate(ids, drafter="none", **options) for ids in prompts]
    for drafter in (f"eagle3(model={folder})", f"auto(head=eagle3(model={folder}))"):
        drafted = engine.generate(prompts, drafter=drafter, **options)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert sum(one.stats.drafted for one in drafted) > 20


@pytest.mark.parametrize(("half", "native"), [(torch.bfloat16, True), (torch.float16, False)])
def test_a_half_precision_head_beside_a_float32_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: torch.dtype, native: bool
) -> None:
    """It computes in its own dtype if the processor does; answers are the target's in any case."""
    monkeypatch.setattr("draftsmith.model.dtype.computes_in", lambda *_: native)
    model = build("llama", num_hidden_layers=5, hidden_size=32)
    tensors = random_head(32, VOCAB, 40, norm_output=True)
    del tensors["embed_tokens.weight"]
    tensors = {n: t.to(half) if t.is_floating_point() else t for n, t in tensors.items()}
    folder = save(tmp_path / "head", tensors, layer_ids=LAYERS, norm_output=True)
    engine, ids = Engine.from_pretrained(model), prompt(30, seed=2)
    head = Eagle3(folder).bind(engine.model.facts).head
    assert head.fuse.fc.weight.dtype == (half if native else torch.float32)
    assert head.embeddings.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    plain, drafted, fused = (
        engine.generate(ids, max_new_tokens=20, drafter=drafter.format(folder), budget=6)
        for drafter in ("none", "eagle3(model={})", "auto(head=eagle3(model={}))")
    )
    assert plain.tokens == drafted.tokens == fused.tokens
    assert drafted.stats.drafted > 40


def test_behind_the_models_own_generate(folder: str) -> None:
    model, ids = target(), torch.tensor([prompt(40, seed=1)])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    with accelerate(model, f"eagle3(model={folder})", budget=6) as handle:
        assert torch.equal(model.generate(ids, **options), plain)
        assert handle.stats.drafted > 20


def refuse(folder: str, model: Any, match: str, error: type[Exception] = LoadError) -> None:
    with pytest.raises(error, match=match):
        Engine.from_pretrained(model).generate(
            [[1, 2, 3]], max_new_tokens=2, drafter=f"eagle3(model={folder})"
        )


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    model, tensors = target(), random_head(64, VOCAB, 40)

    def head(tensors: dict[str, torch.Tensor], **fields: Any) -> str:
        options = {"layer_ids": LAYERS} | fields
        return save(tmp_path / str(len(list(tmp_path.iterdir()))), tensors, **options)

    unsupported = UnsupportedError
    refuse(head(tensors, warp_factor=2), model, "field 'warp_factor'", unsupported)
    extra = tensors | {"layers.0.gate.weight": torch.ones(2)}
    refuse(head(extra), model, "tensor 'layers.0.gate.weight' is not known", unsupported)
    less = {name: t for name, t in tensors.items() if "hidden_norm" not in name}
    refuse(head(less), model, "'layers.0.hidden_norm.weight' should have .* is missing")
    for name, value in {"eagle_aux_hidden_state_layer_ids": 5, "target_hidden_size": "64"}.items():
        refuse(head(tensors, **{"layer_ids": None, name: value}), model, f"{name} in its config")
    refuse(head(tensors, transformer_layer_config=None), model, "describes no layer")
    refuse(head(tensors, norm_before_fc=True), model, "'input_norm.weight' should have")
    refuse(head(tensors, layer_ids=(1, 3, 6)), model, "layer=6", OptionError)
    refuse(head(tensors, speculators_model_type="medusa"), model, "no EAGLE-3 head", unsupported)
    rope = {"rope_scaling": {"rope_type": "longrope"}}
    refuse(head(tensors, **rope), model, "'longrope'", unsupported)
    moved = tensors | {"d2t": tensors["d2t"] + 60}
    refuse(head(moved), model, "another vocabulary")
    refuse(head(random_head(32, VOCAB, 40)), model, "states of the width 32")
    folder = Path(head(tensors))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    refuse(str(folder), model, "pytorch_model.bin only, a pickle.*draftsmith train unpickle")
    saved = load_file(new := unpickle(folder))
    assert new.stat().st_mode == (folder / "pytorch_model.bin").stat().st_mode
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)
    torch.save({"head": Path("x")}, folder / "model.bin")
    for made in ("model.safetensors", "pytorch_model.bin"):
        (folder / made).unlink()
    with pytest.raises(LoadError, match="cannot be read as tensors"):
        unpickle(folder)
    refuse(str(tmp_path / "nowhere"), model, "there is no folder")


def test_a_head_without_embeddings_takes_those_of_its_target(tmp_path: Path) -> None:
    """Which must be as wide as itself."""
    tensors = random_head(64, VOCAB, 40)
    own = tensors.pop("embed_tokens.weight")
    refuse(
        save(tmp_path / "head", tensors, layer_ids=LAYERS), target(), r"the width 32.*\(97, 64\)"
    )
    model = build("llama", hidden_size=32)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(own)
    drafts = []
    for name, given in (("with", {"embed_tokens.weight": own}), ("without", {})):
        head = random_head(32, VOCAB, 40, reads=1)
        del head["embed_tokens.weight"]
        folder = save(tmp_path / name, head | given, layer_ids=(1,))
        watched, engine = Watched(Eagle3(folder)), Engine.from_pretrained(model)
        engine.generate([prompt(9)], max_new_tokens=8, drafter=watched, budget=6)
        drafts.append([draft for _, draft in watched.found])
    assert drafts[0] == drafts[1]
    assert drafts[0]
