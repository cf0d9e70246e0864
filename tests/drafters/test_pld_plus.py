"""PLD+ on hand-made taps, then on models: what it copies, what it asks for, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import drafted
import pytest
import torch
from torch import Tensor

from architectures import build
from draftsmith import storage
from draftsmith.core.drafter import Context
from draftsmith.core.target import ModelFacts, Needs
from draftsmith.drafters import calibration
from draftsmith.drafters.calibration import Calibration
from draftsmith.drafters.pld_plus import AT_ONCE, PldPlus, state_before
from draftsmith.drafters.registry import parse
from draftsmith.engine.engine import Engine
from draftsmith.errors import LoadError, OptionError, UnsupportedError
from draftsmith.testing import check_drafter

FACTS = ModelFacts(layers=32, heads=32)


def context(
    ids: list[int], hidden: Tensor | None = None, attention: Tensor | None = None
) -> Context:
    weights = None if attention is None else lambda positions: attention[:, positions]
    return drafted.context(ids, 100, budget=99, depth=99, hidden=hidden, attention=weights)


def states(ids: list[int], like: dict[int, float]) -> Tensor:
    """(T-1, 2) states; the one before t is (1, 0), the others turn away by the given cosines."""
    rows = torch.zeros(len(ids) - 1, 2)
    rows[:, 1] = 1
    for position, cosine in like.items():
        rows[position] = 3 * torch.tensor([cosine, (1 - cosine**2) ** 0.5])  # length is no likeness
    rows[-1] = torch.tensor([1.0, 0.0])
    return rows


def copied(drafter: PldPlus, ctx: Context) -> tuple[list[int], list[int] | None]:
    draft = drafter.open(ctx).draft(ctx)
    return list(draft.tokens), None if draft.origins is None else list(draft.origins)


#             0  1  2  3  4  5  6  7  8  9 10 11
IDS = [7, 20, 21, 7, 30, 31, 7, 40, 41, 9, 50, 7]
"""7 stands at 0, 3, 6 and last."""


SINK = [7, 1, 7, 2, 7]
ALONE = [3, 7, 1, 7]
OVERFLOWED = torch.full((len(IDS) - 1, 2), float("inf"))
HEADS = torch.zeros(3, len(IDS) - 1)
HEADS[0, 3], HEADS[1:, 6] = 0.6, 0.4


@pytest.mark.parametrize(
    ("drafter", "ctx", "places"),
    [
        # The most alike past is copied.
        (PldPlus(K=2), context(IDS, states(IDS, {2: 0.9, 5: 0.5})), [4, 5]),
        (PldPlus(K=2), context(IDS, states(IDS, {2: 0.5, 5: 0.9})), [7, 8]),
        # The first position ranks last: no state is before it, and an attention sink is no copy.
        (PldPlus(K=1), context(SINK, states(SINK, {1: -1.0})), [3]),
        (
            PldPlus("attention", K=1),
            context(SINK, attention=torch.tensor([[0.9, 0.0, 0.1, 0.0]])),
            [3],
        ),
        # One candidate is not scored; nothing is drafted without one, or where nothing is recorded.
        (PldPlus(K=3), context([7, 1, 2, 7]), [1, 2, 3]),
        (PldPlus(), context([1, 2, 3]), []),
        (PldPlus(), context(IDS), []),
        # A copy ends with the last known token.
        (PldPlus(), context([1, 1]), [1]),
        (PldPlus(), context(IDS, states(IDS, {5: 0.9})), [7, 8, 9, 10, 11]),
        # A threshold drops what is not alike, also a single candidate and the first position.
        (PldPlus(K=1, threshold=0.0), context(IDS, states(IDS, {2: 0.3, 5: -0.2})), [4]),
        (PldPlus(K=1, threshold=0.35), context(IDS, states(IDS, {2: 0.3, 5: -0.2})), []),
        (PldPlus(threshold=0.0), context(ALONE, states(ALONE, {0: -0.5})), []),
        (PldPlus(threshold=0.0), context([7, 1, 7], torch.ones(2, 2)), []),
        # Heads by maximum and by sum.
        (PldPlus("attention", K=1), context(IDS, attention=HEADS), [4]),
        (PldPlus("attention", combine="sum", K=1), context(IDS, attention=HEADS), [7]),
        # States that overflowed do not stop it.
        (PldPlus(K=1), context(IDS, OVERFLOWED), [7]),
    ],
)
def test_copies(drafter: PldPlus, ctx: Context, places: list[int]) -> None:
    tokens, origins = copied(drafter, ctx)
    assert tokens == [ctx.ids[place] for place in places]
    assert origins == (places or None)
    ctx.budget = 2
    assert copied(drafter, ctx)[0] == tokens[:2]


def test_means_over_several_states() -> None:
    hidden = torch.tensor([[2.0], [4.0], [9.0], [2.0]])
    at = torch.tensor([4, 2, 1])
    assert state_before(hidden, at, 1).flatten().tolist() == [2, 4, 2]
    assert state_before(hidden, at, 3).flatten().tolist() == [5, 3, 2]


@pytest.mark.parametrize(("dtype", "average"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_many_candidates_are_ranked_as_if_compared_at_once(
    dtype: torch.dtype, average: int
) -> None:
    """Against all cosines in one call, with copies of the best state: the most recent is used."""
    generator = torch.Generator().manual_seed(average)
    for _ in range(4):
        ids = torch.randint(5, 7, (1500,), generator=generator).tolist()
        hidden = torch.randn(1499, 48, generator=generator).to(dtype)
        places = [j for j in range(1, 1499) if ids[j] == ids[-1]]
        assert len(places) > 2 * AT_ONCE
        for place in (places[3], places[300], places[301], places[-40]):
            for back in range(1, average + 1):
                hidden[place - back] = hidden[1499 - back]
        t = torch.tensor([1499])
        cosines = torch.cosine_similarity(
            state_before(hidden, torch.tensor(places), average), state_before(hidden, t, average)
        )
        best = max(range(len(places)), key=lambda i: (float(cosines[i]), places[i]))
        assert (cosines == cosines.max()).sum() > 1
        drafter = PldPlus(K=1, average=average)
        assert copied(drafter, context(ids, hidden))[1] == [places[best] + 1]


def test_needs_follow_the_model() -> None:
    assert PldPlus().needs_of(FACTS) == Needs(hidden_layers=(9,))
    assert PldPlus().needs_of(ModelFacts(2, 4)) == Needs(hidden_layers=(1,))
    assert PldPlus(layer=4).needs_of(FACTS) == Needs(hidden_layers=(4,))
    pairs = ((3, 1), (0, 2))
    assert PldPlus(rank="attention", heads=pairs).needs_of(FACTS) == Needs(attention_heads=pairs)
    layer = PldPlus(rank="attention", heads="layer", layer=2).needs_of(ModelFacts(4, 3))
    assert layer.attention_heads == ((1, 0), (1, 1), (1, 2))
    assert len(PldPlus(rank="attention", heads="all").needs_of(FACTS).attention_heads) == 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "logits"}, "'hidden' or 'attention'"),
        ({"combine": "mean"}, "'max' or 'sum'"),
        ({"K": 0}, "K must be"),
        ({"layer": 0}, "layer must be"),
        ({"average": 0}, "average must be"),
        ({"heads": 0}, "heads must be an integer >= 1, got 0"),
        ({"heads": "most"}, r"\(layer, head\) pairs"),
        ({"heads": ((1, 2, 3),)}, "heads must be"),
        ({"heads": ()}, "heads must be"),
        ({"threshold": 2.0}, "threshold must be .* cosine"),
        ({"rank": "attention", "threshold": 0.0}, "rank='hidden'"),
        ({"rank": "attention", "average": 2}, "rank='hidden'"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PldPlus(**options)


SETTINGS = [
    "pld_plus(K=1)",
    "pld_plus(threshold=0.0)",
    "pld_plus(average=3)",
    "pld_plus(rank=attention, heads=((0, 1), (1, 0)))",
    "pld_plus(rank=attention, heads=all, combine=sum)",
    "pld_plus(rank=attention, heads=layer, layer=2)",
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SETTINGS)
def test_contract(spec: str) -> None:
    check_drafter(parse(spec))


# ----------------------------------------------------------------------------- calibrations


def calibrated(**changes: Any) -> Calibration:
    fields: dict[str, Any] = {
        "model": "some/model",
        "layers": 32,
        "heads_per_layer": 32,
        "layer": 11,
        "heads": ((5, 1, 40), (7, 2, 30), (1, 0, 2)),
        "K": {"hidden": 70, "attention": 40},
        "accepted": {"layer": {"11": 3.5}},
        "prompts": 8,
        "tokens": 900,
    }
    return Calibration(**fields | changes)


def test_a_calibration_is_found_by_name(kept: Path) -> None:
    facts = ModelFacts(32, 32, "some/model")
    assert calibration.load(facts) is None
    path = calibrated().save()
    assert path.parent == kept / "pld_plus"
    assert calibration.load(facts) == calibrated()
    assert calibration.load(ModelFacts(32, 32)) is None  # a model made in memory has no name
    needs = PldPlus().needs_of(facts)
    assert needs == Needs(hidden_layers=(11,))
    assert "layer 11 from its calibration on 8 prompts" in needs.why
    assert "K=" not in needs.why
    attention = PldPlus(rank="attention", heads=2).needs_of(facts)
    assert attention.attention_heads == ((5, 1), (7, 2))
    assert "K=40 was best there, K=70 is used" in attention.why
    assert PldPlus(layer=3).needs_of(facts).why == ""


@pytest.mark.usefixtures("kept")
def test_without_a_calibration_the_best_heads_are_not_known() -> None:
    with pytest.raises(OptionError, match="tune pld-plus"):
        PldPlus(rank="attention").needs_of(ModelFacts(32, 32, "some/model"))


@pytest.mark.usefixtures("kept")
def test_a_wrong_calibration_is_named() -> None:
    path = calibrated().save()
    with pytest.raises(LoadError, match="32 layers with 32 heads, not of 4 with 32"):
        calibration.load(ModelFacts(4, 32, "some/model"))
    path.write_text('{"format": 99}', encoding="utf-8")
    with pytest.raises(LoadError, match="delete it"):
        calibration.load(ModelFacts(32, 32, "some/model"))
    for text in ("{", "null", "5"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(LoadError, match="not a calibration"):
            calibration.load(ModelFacts(32, 32, "some/model"))
    path.write_text("{", encoding="utf-8")
    with pytest.raises(LoadError, match="not a calibration"):
        PldPlus().needs_of(ModelFacts(32, 32, "some/model"))


@pytest.mark.usefixtures("kept")
def test_a_folder_has_one_name_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert calibration.file_of("model") == calibration.file_of(str(tmp_path / "model"))
    assert calibration.file_of("model") != calibration.file_of("org/model")
    monkeypatch.delenv("DRAFTSMITH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert storage.cache_folder() == tmp_path / "xdg" / "draftsmith"


# ----------------------------------------------------------------------------- with a model


def test_a_model_whose_attention_is_not_ours_is_refused() -> None:
    engine = Engine.from_pretrained(build("falcon"))
    with pytest.raises(UnsupportedError, match="only draftsmith's attention function records"):
        engine.generate([5, 6, 7, 5], drafter=SETTINGS[3])
