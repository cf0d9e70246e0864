"""Our definition of trained heads beside that of `speculators` and of `economize`.

They are in an environment of their own (tests/environments.py). What drafters compute is held
against the definition in `test_eagle3.py` and `test_mtp.py`; here the definition is held against
other people's code.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.environments import run_tests
from torch import Tensor

from architectures import VOCAB, build, prompt
from heads import FIELDS, Plainly, random_head, save, save_with_module

pytestmark = [pytest.mark.external, pytest.mark.filterwarnings("ignore")]  # those of the others
HERE = find_spec("speculators") is not None
beside_them = pytest.mark.skipif(not HERE, reason="they run where speculators and economize are")
LAYERS, STEPS = (1, 3, 4), 3
SHAPES: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"q_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True, "layers": 2},
    {"fc_norm": True, "norm_output": True},
]


@pytest.mark.skipif(HERE, reason="the others run in this process")
def test_all_that_is_below_where_the_others_are(tmp_path: Path) -> None:
    run_tests("heads", __file__, tmp_path)


def expected(plainly: Plainly, ids: list[int], g: Tensor, k: int) -> Tensor:
    """(n, K) probabilities at each place whose next 1 + k tokens are known, k of them as drafts."""
    places = range(len(ids) - 2 - k)
    return torch.stack(
        [plainly.next(ids[: i + 2], g[: i + 1], ids[i + 2 : i + 2 + k])[1] for i in places]
    )


@beside_them
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_speculators_defines_eagle3_likewise(shape: dict[str, Any]) -> None:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    tensors = random_head(32, VOCAB, 40, **shape)
    flags = {name: True for name in shape if name not in ("q_norm", "layers")}
    kind = Qwen3Config if shape.get("q_norm") else LlamaConfig
    layer = kind(**FIELDS, vocab_size=VOCAB, num_hidden_layers=shape.get("layers", 1))
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    theirs = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=40,
            eagle_aux_hidden_state_layer_ids=list(LAYERS),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
            **flags,
        )
    ).eval()
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all("verifier" in name for name in missing)
    ids, states = prompt(12, seed=3), torch.randn(11, 96)
    logits: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda *args: logits.append(args[2]))
    with torch.no_grad():
        theirs(
            hidden_states=states[None],
            input_ids=torch.tensor([ids[1:]]),
            document_ids=torch.zeros(1, 11, dtype=torch.long),
            ttt_steps=STEPS,
        )
        plainly = Plainly(tensors, flags)
        g = plainly.fuse(list(states.chunk(3, -1)))
        for k in range(STEPS):
            wanted = expected(plainly, ids, g, k)
            found = logits[k][0, : len(wanted)].softmax(-1)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@beside_them
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_economize_defines_eagle3_likewise(shape: dict[str, Any], tmp_path: Path) -> None:
    """The formats, the blocks that are read, and the steps; it knows fewer flags."""
    import economize

    model = build("llama", hidden_size=32, num_hidden_layers=5)
    tensors = random_head(32, VOCAB, 40, **shape)
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    flags = dict.fromkeys(shape, True)
    ids = prompt(12, seed=3)
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        plainly = Plainly(tensors, flags)
        g = plainly.fuse([states[layer][0, :-1] for layer in LAYERS])
        for flat in (True, False):
            folder = save(tmp_path / str(flat), tensors, flat=flat, layer_ids=LAYERS, **flags)
            technique = economize.load(model, folder).techniques["eagle3"]
            assert tuple(technique.aux_layers) == LAYERS
            outputs = technique.rollout(dict(enumerate(states)), STEPS)
            for k in range(STEPS):
                wanted = expected(plainly, ids, g, k)
                found = technique.head_logits(outputs[k])[0, : len(wanted)].softmax(-1)
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


@beside_them
@pytest.mark.parametrize("case", [("deepseek_v3", "deepseek"), ("qwen3_5_text", "qwen")], ids=str)
def test_economize_defines_mtp_likewise(case: tuple[str, str], tmp_path: Path) -> None:
    import economize

    module, ids = save_with_module(*case, tmp_path), prompt(12, seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    theirs = economize.load(module.model, tmp_path)
    technique = theirs.techniques["vendor_mtp"]
    raw: list[Tensor] = []
    hook = module.model.model.layers[-1].register_forward_hook(lambda *args: raw.append(args[2]))
    with torch.no_grad():
        normed = module.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        hook.remove()
        teacher = SimpleNamespace(hidden={technique.adapter.num_layers: raw[0]})
        batch = SimpleNamespace(input_ids=torch.tensor([ids]))
        starts = torch.arange(len(ids) - STEPS - 1)
        found = technique.step_states(theirs, batch, teacher, starts, STEPS)
        for k in range(STEPS):
            for s in starts.tolist():
                wanted = module.next(ids[: s + 2], normed[: s + 1], ids[s + 2 : s + 2 + k])
                ours = technique.head(found[k][0, s]).float().softmax(-1)
                torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-5)
