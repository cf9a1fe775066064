"""Two answers of a tiny model that need different experts: what a test of a failing drive has to have.

Owns the search for the prompts. The right tokens come from the undamaged model, through the core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri.core.container import open_container
from colibri.core.core import Row
from colibri.daemon.opening import open_text
from testkit.damage import Extent, Need, Needs, experts_needed, extents
from testkit.models import GREEDY, Tiny, make_tiny, opened, run, step_rows

VICTIM_TOKENS, BYSTANDER_TOKENS = 12, 120
WEIGHTS = (2, 1)
LATE = 3  # tokens of the victim's answer that come before it needs the bad expert
SIZES = {"num_experts": 256, "num_experts_per_tok": 1, "max_position_embeddings": 512}

Places = dict[tuple[int, int], list[Extent]]


@dataclass(frozen=True)
class Scene:
    """Two prompts with their greedy answers; `bad` is an expert that the victim's answer needs from its token
    `bad.produced` on, and the bystander's not at all."""

    tiny: Tiny
    victim: list[int]
    victim_answer: list[int]
    bystander: list[int]
    bystander_answer: list[int]
    bad: Need

    def place(self, tiny: Tiny) -> Extent:
        """Where a copy of the model has the bad expert."""
        (place,) = extents(tiny)[self.bad.layer, self.bad.expert]
        return place


def make_scene(folder: Path) -> Scene:
    """Pack a model of so many experts that two answers differ in theirs; `bad` lies on the last stripe.

    Behind `bad` that stripe holds nothing that the bystander needs: a drive that has lost everything from there on
    does not concern it.
    """
    tiny = make_tiny("qwen3_moe", folder / "model", "", WEIGHTS, **SIZES)
    last = tiny.folders[-1]
    places = {key: record for key, record in extents(tiny).items() if record[0].path.parent == last}
    with Needs(tiny, folder / "search", expert_slots=1) as quick:  # nearly right
        first = min(range(5, 15), key=lambda token: _end(places, quick.of([token], BYSTANDER_TOKENS)))
        end = _end(places, experts_needed(tiny, [first], BYSTANDER_TOKENS, folder / "exact"))
        for victim in ([token, 3] for token in range(20, 100)):
            if _late_behind(places, quick.of(victim, VICTIM_TOKENS), end) is None:
                continue
            bad = _late_behind(places, experts_needed(tiny, victim, VICTIM_TOKENS, folder / "exact"), end)
            if bad is not None:
                answers = greedy(tiny, victim, VICTIM_TOKENS), greedy(tiny, [first], BYSTANDER_TOKENS)
                return Scene(tiny, victim, answers[0], [first], answers[1], bad)
    raise AssertionError("no prompt needs an expert behind all that the other needs")


def _end(places: Places, needs: Iterable[Need]) -> int:
    """Where the last of the needed experts begins, among `places`."""
    return max((places[n.layer, n.expert][0].offset for n in needs if (n.layer, n.expert) in places), default=0)


def _late_behind(places: Places, needs: Iterable[Need], end: int) -> Need | None:
    """The first expert among `places` that lies behind `end` and is not needed for the first tokens."""
    for need in needs:
        record = places.get((need.layer, need.expert))
        if need.produced >= LATE and record is not None and record[0].offset > end:
            return need
    return None


def greedy(tiny: Tiny, prompt: Sequence[int], count: int) -> list[int]:
    """What a daemon answers to `prompt` at temperature 0."""
    with open_container(tiny.folders[0], tiny.folders[1:], lock=False) as container:
        banned = tuple(open_text(container).banned_ids())
    with opened(tiny, expert_slots=2, banned_tokens=banned) as model:
        sequence = model.sequence()
        answer = [run(model, model.prefill(sequence, list(prompt), GREEDY)).next_token]
        while len(answer) < count:
            answer.append(step_rows(model, [Row(sequence, answer[-1], GREEDY)])[0].next_token)
    return answer
