"""Protocol messages as JSON-ready values."""

from __future__ import annotations

import json
import math

from colibri.client.plain import plain
from colibri.v1 import admin_service_pb2, types_pb2


def test_numbers_stay_numbers_and_only_set_submessages_appear() -> None:
    session = types_pb2.Session(name="sessions/a", position=2**63, state=types_pb2.Session.STATE_LIVE)
    session.labels["kind"] = "test"
    session.ttl.FromMilliseconds(1500)
    session.create_time.FromJsonString("2026-01-02T03:04:05Z")
    value = plain(session)
    assert json.loads(json.dumps(value)) == value
    assert (value["position"], value["state"], value["labels"]) == (2**63, "STATE_LIVE", {"kind": "test"})
    assert (value["ttl"], value["create_time"]) == (1.5, "2026-01-02T03:04:05Z")
    assert "expire_time" not in value


def test_a_seed_is_text_for_readers_that_round_large_numbers() -> None:
    assert plain(types_pb2.SamplingParams(seed=2**64 - 1)) == {"seed": str(2**64 - 1), "logit_bias": {}}
    assert plain(types_pb2.Generation(seed=7))["seed"] == "7"


def test_optional_scalars_appear_where_they_are_set() -> None:
    sampling = types_pb2.SamplingParams(temperature=0.0, logit_bias={5: -0.1})
    assert plain(sampling) == {"temperature": 0.0, "logit_bias": {"5": -0.1}}


def test_floats_are_the_shortest_that_mean_the_same() -> None:
    for number in (0.7, 1e-9, 3.4e38, 0.1 + 0.2, 16777217.0, math.pi):
        shown = plain(types_pb2.SamplingParams(temperature=number))["temperature"]
        assert types_pb2.SamplingParams(temperature=shown) == types_pb2.SamplingParams(temperature=number)
    assert plain(types_pb2.SamplingParams(top_p=0.9))["top_p"] == 0.9


def test_lists_and_unknown_enum_numbers() -> None:
    info = admin_service_pb2.GetServerInfoResponse(eos_token_ids=[1, 2], capabilities=["a"])
    assert (plain(info)["eos_token_ids"], plain(info)["capabilities"]) == ([1, 2], ["a"])
    assert plain(types_pb2.Session.FromString(b"\x20\x63"))["state"] == 99
    match = types_pb2.Generation(stop_match=types_pb2.StopMatch(token_id=7))
    assert plain(match)["stop_match"] == {"token_id": 7}


def test_bytes_are_lists_of_numbers() -> None:
    value = plain(admin_service_pb2.Stats(expert_heat=b"\x00\xff"))
    assert value["expert_heat"] == [0, 255]
    assert json.loads(json.dumps(value)) == value
