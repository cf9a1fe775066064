"""A replay repeats the hits and loads of the recorded run; damaged traces are refused; a full disk stops no model."""

import random
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.core.core import Model, Prefill, Row
from colibri.core.errors import CorruptError, InvalidError, StorageError, UnsupportedError
from colibri.core.traces import KNOWN_ONLINE, POLICIES, Trace
from testkit.models import GREEDY, Tiny, decode, opened, prefill, some_tokens
from testkit.routing_traces import TICK, block, header, turn, varint, write_routing

ALL_EXPERTS = 2 * 8  # tiny_int4: two MoE layers of eight


def mixed_work(model: Model, seed: int, steps: int = 60) -> None:
    """Sequences that decode side by side while prompts come, are interrupted after every item, and are given up."""
    chance, cursors = random.Random(seed), list[Prefill]()
    sequences = [model.sequence() for _ in range(3)]
    for step in range(steps):
        if len(cursors) < 2 and chance.random() < 0.3:
            tokens = some_tokens(chance.randrange(1, 40), start=step)
            cursors.append(model.prefill(model.sequence(), tokens, GREEDY))
        rows = [Row(seq, chance.randrange(139), GREEDY) for seq in sequences if chance.random() < 0.8]
        if rows and chance.random() < 0.1:
            rows[0].seq.cancel()
        model.step(rows, cursors, chance.choice([0, 0, 2000]))
        if cursors and chance.random() < 0.05:
            cursors[0].close()
        for cursor in [c for c in cursors if c.done or c._handle is None]:
            seq = cursor._seq
            cursor.close()
            seq.close()
            cursors.remove(cursor)
    for seq in [*sequences, *(cursor._seq for cursor in cursors)]:
        seq.close()


@contextmanager
def recording(model: Model, path: Path) -> Iterator[None]:
    model.trace(path)
    yield
    assert model.trace_error() is None
    model.trace(None)


@pytest.mark.parametrize("slots", [1, 2, 5, 9, ALL_EXPERTS])
@pytest.mark.parametrize(("ring", "lookahead"), [(2, "off"), (2, "on"), (8, "off"), (8, "on")])
def test_a_replay_repeats_the_live_counts(
    tiny_int4: Tiny, tmp_path: Path, slots: int, ring: int, lookahead: Literal["on", "off"]
) -> None:
    with opened(tiny_int4, expert_slots=slots, ring_slots=ring, max_rows=3, lookahead=lookahead) as model:
        for part in range(2):  # from an empty cache, then from one that has been at work
            before = model.stats()
            with recording(model, tmp_path / f"{part}.trace"):
                mixed_work(model, seed=10 * slots + part)
            after = model.stats()
            hits, loads = after.expert_hits - before.expert_hits, after.expert_loads - before.expert_loads
            with Trace(tmp_path / f"{part}.trace") as trace:
                seen = trace.replay()
                assert (trace.info.is_complete, trace.info.live_hits, trace.info.live_loads) == (1, hits, loads)
                assert (trace.info.cache_slots, trace.info.ring_slots) == (slots, ring)
                assert seen.differences == 0
                assert (seen.hits, seen.loads) == (hits, loads)
                assert seen.evictions == after.expert_evictions - before.expert_evictions
            assert hits > 0
            assert loads > 0 or slots + ring >= ALL_EXPERTS


def test_warm_up_and_learned_heat_are_part_of_the_replay(tiny_int4: Tiny, tmp_path: Path) -> None:
    heat = np.linspace(0, 1, ALL_EXPERTS, dtype=np.float32)
    with opened(tiny_int4, expert_slots=6, ring_slots=2) as model:
        model.import_heat(heat)
        with recording(model, tmp_path / "trace"):
            while model.warm(1000):
                decode(model, model.sequence(), some_tokens(3))
            decode(model, model.sequence(), some_tokens(40))
        stats = model.stats()
    with Trace(tmp_path / "trace") as trace:
        seen = trace.replay()
        assert (seen.hits, seen.loads, seen.differences) == (stats.expert_hits, stats.expert_loads, 0)
        assert seen.early_loads == stats.expert_bytes // trace.info.most_record_bytes - stats.expert_loads > 0


def test_a_comparison_is_of_decoding_alone_and_from_nothing(tiny_int4: Tiny, tmp_path: Path) -> None:
    """Prompts, lookahead and learned heat, which the other policies do not get, change nothing."""
    ids = [some_tokens(60, start=start) for start in range(2)]
    for name, heat, prompt in (("plain", False, 0), ("busy", True, 30)):
        with opened(tiny_int4, expert_slots=6, ring_slots=2, max_rows=3, lookahead="on" if heat else "off") as model:
            if heat:
                model.import_heat(np.linspace(0, 1, ALL_EXPERTS, dtype=np.float32))
            with recording(model, tmp_path / name):
                for tokens in ids:
                    decode(model, seq := model.sequence(), tokens)
                    seq.close()
                    if prompt:
                        prefill(model, model.sequence(), some_tokens(prompt))
    with Trace(tmp_path / "plain") as plain, Trace(tmp_path / "busy") as busy:
        assert busy.info.prefill_uses > 0
        for slots in (1, 3, 8, 12):
            assert plain.policy("ours", slots, 100) == busy.policy("ours", slots, 100)


def test_the_counted_part_begins_with_a_whole_turn(tiny_int4: Tiny, tmp_path: Path) -> None:
    with opened(tiny_int4, expert_slots=5, max_rows=3) as model, recording(model, tmp_path / "trace"):
        mixed_work(model, seed=3)
    with Trace(tmp_path / "trace") as trace:
        every = [trace.policy("ours", slots) for slots in (1, 2, 4, 8, ALL_EXPERTS)]
        assert {found.accesses for found in every} == {trace.info.accesses}
        assert len({found.steps for found in every}) == 1
        assert 0 < every[0].steps <= trace.info.steps  # some steps had no row
        loads = [found.loads for found in every]
        assert loads == sorted(loads, reverse=True)
        assert loads[-1] <= ALL_EXPERTS
        half = trace.policy("ours", 8, trace.info.accesses // 2)
        assert 0 <= half.accesses - (trace.info.accesses - trace.info.accesses // 2) < 8
        assert 0 < half.loads < every[3].loads
        assert half.bytes == half.loads * trace.info.most_record_bytes
        assert 0 < half.steps < trace.info.steps
        assert trace.policy("ours", 8, 2**40).accesses == 0
        for name in POLICIES:
            for slots in (0, ALL_EXPERTS + 1):
                with pytest.raises(InvalidError, match=f"slots is {slots}, must be 1..{ALL_EXPERTS}"):
                    trace.policy(name, slots)


def test_a_trace_goes_to_a_new_file_and_only_one_at_a_time(tiny_int4: Tiny, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"precious")
    with opened(tiny_int4) as model:
        model.trace(None)  # nothing to end
        with pytest.raises(StorageError, match=r"old: the trace cannot be created: File exists"):
            model.trace(tmp_path / "old")
        with pytest.raises(StorageError, match=r"nowhere/trace: the trace cannot be created: No such file"):
            model.trace(tmp_path / "nowhere" / "trace")
        model.trace(tmp_path / "new")
        with pytest.raises(InvalidError, match="a trace is being recorded already"):
            model.trace(tmp_path / "other")
        with pytest.raises(InvalidError, match="heat cannot be imported while a trace is recorded"):
            model.import_heat(model.export_heat())
    assert (tmp_path / "old").read_bytes() == b"precious"
    assert not (tmp_path / "other").exists()
    with Trace(tmp_path / "new") as trace:
        assert trace.info.is_complete  # closing the model ends its recording


def test_a_full_disk_stops_the_trace_and_not_the_model(tiny_int4: Tiny, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tiny_int4, max_rows=3) as model:
        model.trace(tmp_path / "trace")
        room = (tmp_path / "trace").stat().st_size + 20000  # one block and a part of the next
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            for seed in range(200):
                mixed_work(model, seed, steps=40)
                if model.trace_error() is not None:
                    break
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        error = model.trace_error()
        assert isinstance(error, StorageError)
        assert "the trace cannot be written: File too large; recording has stopped" in str(error)
        tokens = model.stats().decode_tokens
        decode(model, model.sequence(), some_tokens(5))
        assert model.stats().decode_tokens == tokens + 5
        with pytest.raises(StorageError, match="cannot be written"):
            model.trace(None)
        model.trace(tmp_path / "next")  # and a new one may begin
    with Trace(tmp_path / "trace") as trace:  # what was written can be used
        assert not trace.info.is_complete
        assert trace.info.accesses > 1000
        assert trace.replay().differences == 0


# ---- hostile files --------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tiny_int4: Tiny, tmp_path: Path) -> bytes:
    with opened(tiny_int4, expert_slots=4, max_rows=3) as model, recording(model, tmp_path / "good.trace"):
        mixed_work(model, seed=1, steps=20)
    return (tmp_path / "good.trace").read_bytes()


def read(folder: Path, data: bytes) -> Trace:
    (folder / "bad.trace").write_bytes(data)
    return Trace(folder / "bad.trace")


def test_a_trace_that_was_cut_off_is_read_up_to_its_last_whole_block(recorded: bytes, tmp_path: Path) -> None:
    header_bytes = struct.unpack_from("<Q", recorded, 16)[0]
    for size in range(0, len(recorded), 7):
        if size < header_bytes:
            with pytest.raises(CorruptError, match=r"bad.trace: (too short for a trace|cut off in its header)"):
                read(tmp_path, recorded[:size])
        else:
            with read(tmp_path, recorded[:size]) as trace:
                assert (trace.info.is_complete, trace.info.accesses) == (0, 0)


def test_a_flipped_bit_is_found(recorded: bytes, tmp_path: Path) -> None:
    for at in [*range(64), *range(64, len(recorded), 11)]:
        damaged = bytearray(recorded)
        damaged[at] ^= 0x10
        # A length that reaches beyond the end looks like a cut; then nothing of the block is used.
        with suppress(CorruptError, UnsupportedError), read(tmp_path, bytes(damaged)) as trace:
            assert (trace.info.is_complete, trace.info.accesses) == (0, 0)


def test_what_is_not_a_trace_is_refused(recorded: bytes, tmp_path: Path) -> None:
    for data, text in {
        b"": "too short for a trace",
        b"x" * 100: "not a trace",
        recorded + b"more": "4 bytes follow the last block",
    }.items():
        with pytest.raises(CorruptError, match=text):
            read(tmp_path, data)
    with pytest.raises(UnsupportedError, match="trace format 2, this build reads 1"):
        read(tmp_path, recorded[:8] + b"\2" + recorded[9:])
    with pytest.raises(InvalidError, match="not a regular file"):
        Trace(tmp_path)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (bytes([64]), "has an expert before any layer"),
        (bytes([0xC0, 65 + 8]), "names an expert that is not there"),
        (bytes([0xC0, 63]), "names an expert that is not there"),
        (bytes([0xC2]), "ends early"),
        (bytes([0xC1, 2]), "names a layer that is not there"),
        (bytes([0xC3, 2]), "counts uses of nothing"),
        (bytes([0xC5, 0, 32]), "names a record that is not there"),
        (bytes([0xC5, 10, 0]), "has a number out of range"),
        (bytes([0xC5, 0, *varint(2**62)]), "names a record that is not there"),
        (bytes([0xC5, 0, *[0xFF] * 12]), "ends early"),
        (bytes([0xCE]), "is of no known kind"),
    ],
)
def test_events_that_cannot_be_are_refused(tmp_path: Path, payload: bytes, text: str) -> None:
    with pytest.raises(CorruptError, match=text):
        read(tmp_path, header([8, 8], 4096, 4, 2) + block(payload, last=True))


def test_events_without_sense_do_no_harm(tmp_path: Path) -> None:
    chance = random.Random(5)
    for _ in range(300):
        events = [
            lambda: turn((e, chance.choice([1, 3])) for e in sorted(chance.sample(range(8), chance.randrange(1, 8)))),
            lambda: bytes([0xC0, 65 + chance.randrange(4)]),
            lambda: bytes([0xC5, chance.randrange(10), 0]),
            lambda: bytes([chance.choice([0xC6, 0xC7, 0xC8, 0xC9, 0xCA, 0xCB, 0xCC]), 0]),
            lambda: bytes([TICK]),
        ]  # fmt: skip
        payload = b"".join(chance.choice(events)() for _ in range(100))
        with read(tmp_path, header([8, 8], 4096, 4, 2) + block(payload, last=True)) as trace:
            trace.replay()
            for slots in (1, 4, 16):
                for policy in POLICIES:
                    found = trace.policy(policy, slots)
                    assert found.loads <= found.accesses == trace.info.accesses


# ---- other policies, against plain versions of them -----------------------------------------------------------------

Turns = list[list[int]]
Routing = npt.NDArray[np.int64]


def plain_loads(turns: Turns, slots: int, worth: Callable[[int, dict[int, list[int]]], float]) -> int:
    """The reads of a policy that evicts the record of least `worth`(record, all its uses so far), plainly."""
    resident, uses, loads, clock = set[int](), dict[int, list[int]](), 0, 0
    for wanted in turns:
        for record in [r for r in wanted if r in resident] + [r for r in wanted if r not in resident]:
            clock += 1
            uses.setdefault(record, []).append(clock)
            if record in resident:
                continue
            loads += 1
            if len(resident) == slots:
                if not (candidates := [r for r in resident if r not in wanted]):
                    continue
                resident.remove(min(candidates, key=lambda r: (worth(r, uses), uses[r][-1])))
            resident.add(record)
    return loads


def some_routing(steps: int = 150, layers: int = 3, experts: int = 12, top_k: int = 3) -> Routing:
    """Popular experts that are others every 40 steps."""
    chance, popularity = np.random.default_rng(2), 1 / np.arange(1, experts + 1)
    weights = [np.roll(popularity, step // 40) / popularity.sum() for step in range(steps)]
    return np.array([[chance.choice(experts, top_k, False, p) for _ in range(layers)] for p in weights])


def turns_of(routing: Routing, experts: int) -> Turns:
    return [sorted(int(layer * experts + e) for e in ids) for step in routing for layer, ids in enumerate(step)]


@pytest.mark.parametrize("slots", [2, 5, 12, 20])
def test_lru_and_lfu_are_what_they_say(tmp_path: Path, slots: int) -> None:
    routing = some_routing()
    turns = turns_of(routing, 12)
    with Trace(write_routing(tmp_path / "t", routing, 12)) as trace:
        assert trace.policy("LRU", slots).loads == plain_loads(turns, slots, lambda r, uses: uses[r][-1])
        assert trace.policy("LFU", slots).loads == plain_loads(turns, slots, lambda r, uses: len(uses[r]))


def steps_of(layers: int) -> st.SearchStrategy[list[list[set[int]]]]:
    """Of each step and layer the experts that are wanted."""
    wanted = st.sets(st.integers(0, 7), min_size=1)
    return st.lists(st.lists(wanted, min_size=layers, max_size=layers), max_size=25)


@given(
    steps=st.integers(1, 3).flatmap(steps_of),
    slots=st.integers(1, 8),
    ring=st.integers(2, 8),
    share=st.sampled_from([0, 0, 0.3, 0.7]),
)
def test_nothing_beats_belady(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[set[int]]], slots: int, ring: int, share: float
) -> None:
    layers = len(steps[0]) if steps else 1
    payload = b"".join(b"".join(turn((e, 1) for e in sorted(ids)) for ids in step) + bytes([TICK]) for step in steps)
    wanted = [(layer, e) for step in steps for layer, ids in enumerate(step) for e in ids]
    data = header([8] * layers, 4096, 1, ring) + block(payload, last=True, steps=len(steps))
    with read(tmp_path_factory.getbasetemp(), data) as trace:
        count_from = int(share * len(wanted))
        loads = {name: trace.policy(name, slots, count_from).loads for name in POLICIES}
        assert loads["Belady"] == min(loads.values())
        if count_from == 0:
            assert loads["Belady"] >= len(set(wanted))


def test_belady_is_the_optimum(tmp_path: Path) -> None:
    tiny = some_routing(steps=6, layers=1, experts=5, top_k=1)
    sequence = [int(e) for step in tiny for ids in step for e in ids]
    with Trace(write_routing(tmp_path / "tiny", tiny, 5)) as trace:
        assert trace.policy("Belady", 2).loads == fewest_loads(tuple(sequence), frozenset(), 2)


def fewest_loads(sequence: tuple[int, ...], resident: frozenset[int], slots: int) -> int:
    """The optimum by trying everything: after a miss, keep any `slots` of what was there and the new one."""
    if not sequence:
        return 0
    first, rest = sequence[0], sequence[1:]
    if first in resident:
        return fewest_loads(rest, resident, slots)
    options = [resident | {first}] if len(resident) < slots else [resident]
    options += [resident - {old} | {first} for old in resident]
    return 1 + min(fewest_loads(rest, option, slots) for option in options)


def test_pins_are_learned_from_what_is_not_counted(tmp_path: Path) -> None:
    routing = some_routing()
    turns = turns_of(routing, 12)
    half = len(turns) // 2
    counts = np.bincount([r for t in turns[:half] for r in t], minlength=36)
    pinned = set(np.argsort(-counts, kind="stable")[:10].tolist())
    with Trace(write_routing(tmp_path / "t", routing, 12)) as trace:
        expected = sum(r not in pinned for t in turns[half:] for r in t)
        assert trace.policy("pins", 10, count_from=3 * half).loads == expected
        with pytest.raises(InvalidError, match="policy 'MRU' is not one of LRU, LFU"):
            trace.policy("MRU", 10)


@pytest.mark.parametrize("rows", [1, 4])
def test_ours_beats_recency_and_frequency_on_drifting_routing(tmp_path: Path, rows: int) -> None:
    routing = some_routing(steps=1200, experts=12)
    with Trace(write_routing(tmp_path / "t", routing, 12, rows=rows)) as trace:
        for slots in (4, 9, 18):
            ours = trace.policy("ours", slots).loads
            assert ours <= min(trace.policy(policy, slots).loads for policy in KNOWN_ONLINE)
