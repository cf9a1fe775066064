"""What each family's config becomes, field by field, for the tiny models that transformers writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from colibri.packer.checkpoint import Checkpoint
from colibri.packer.families import FAMILIES, dense_name, expert_name, resolve
from colibri.packer.model_source import ModelSource, read_matrix
from colibri.v1 import manifest_pb2 as pb
from testkit.checkpoints import TINY_FAMILIES, TINY_VOCAB_SIZE, tiny_checkpoint

HIDDEN = 60
KINDS = (pb.RecordPart.KIND_GATE, pb.RecordPart.KIND_UP, pb.RecordPart.KIND_DOWN)


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def model(folder: Path) -> ModelSource:
    with Checkpoint.open(folder) as checkpoint:
        return resolve(checkpoint)


GQA = {
    "mixtral": pb.GqaSpec(heads=6, kv_heads=2, head_dim=14, scale=14**-0.5),
    "qwen2_moe": pb.GqaSpec(heads=6, kv_heads=2, head_dim=14, scale=14**-0.5),
    "qwen3_moe": pb.GqaSpec(heads=6, kv_heads=2, head_dim=14, scale=14**-0.5, qk_norm=pb.GqaSpec.QK_NORM_HEAD),
    "olmoe": pb.GqaSpec(
        heads=6, kv_heads=2, head_dim=10, scale=10**-0.5, qk_norm=pb.GqaSpec.QK_NORM_FULL, clip_qkv=1.25
    ),
    "glm4_moe": pb.GqaSpec(heads=6, kv_heads=2, head_dim=12, scale=12**-0.5, qk_norm=pb.GqaSpec.QK_NORM_HEAD),
}

_SUM = pb.MoeFfnSpec.RENORMALIZE_SUM


def softmax_moe(**fields: Any) -> pb.MoeFfnSpec:
    return pb.MoeFfnSpec(
        intermediate_size=44, score=pb.MoeFfnSpec.SCORE_SOFTMAX, groups=1, top_groups=1, routed_scale=1, **fields
    )


MOE = {
    "mixtral": softmax_moe(experts=5, top_k=2, renormalize=_SUM),
    "qwen2_moe": softmax_moe(experts=7, top_k=3, shared_intermediate_size=52, shared_output_gate=True),
    "qwen3_moe": softmax_moe(experts=7, top_k=3, renormalize=_SUM),
    "olmoe": softmax_moe(experts=7, top_k=3),
    "glm4_moe": pb.MoeFfnSpec(
        experts=8,
        top_k=3,
        intermediate_size=44,
        score=pb.MoeFfnSpec.SCORE_SIGMOID,
        select_bias=True,
        groups=4,
        top_groups=2,
        renormalize=pb.MoeFfnSpec.RENORMALIZE_SUM_EPSILON,
        routed_scale=1.75,
        shared_intermediate_size=88,
    ),
}
SPARSE = {"qwen2_moe": [0, 2], "qwen3_moe": [0, 2], "glm4_moe": [1, 2]}
ROPE_DIMS = {"mixtral": 14, "qwen2_moe": 14, "qwen3_moe": 14, "olmoe": 10, "glm4_moe": 6}
EPS = {"mixtral": 1e-5, "qwen2_moe": 1e-6, "qwen3_moe": 1e-6, "olmoe": 1e-5, "glm4_moe": 1e-5}


def test_there_is_a_model_for_every_family() -> None:
    assert set(TINY_FAMILIES) == set(FAMILIES)


def test_the_model_s_own_fields(family: str, model: ModelSource) -> None:
    own = pb.ModelSpec()
    own.CopyFrom(model.spec)
    del own.layers[:]
    del own.ropes[:]
    assert own == pb.ModelSpec(
        family=family,
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=HIDDEN,
        max_positions=320,
        norm_eps=EPS[family],
        embedding_scale=1,
        residual_scale=1,
        logits_divisor=1,
    )


def test_every_layer(family: str, model: ModelSource) -> None:
    sparse = SPARSE.get(family, [0, 1, 2])
    assert [layer.gqa for layer in model.spec.layers] == [GQA[family]] * 3
    for number, layer in enumerate(model.spec.layers):
        if number in sparse:
            assert layer.moe == MOE[family]
        else:
            assert layer.dense == pb.DenseFfnSpec(intermediate_size=92)
    assert [layer.layer for layer in model.expert_layers] == sparse
    for experts in model.expert_layers:
        moe = MOE[family]
        assert (experts.experts, experts.intermediate, experts.hidden) == (moe.experts, moe.intermediate_size, HIDDEN)


def test_the_rope_table_is_the_reference_s(family: str, folder: Path, model: ModelSource) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    (table,) = model.spec.ropes
    assert (table.style, table.dims, table.attention_factor) == (pb.RopeTable.STYLE_HALF, ROPE_DIMS[family], 1)
    torch.testing.assert_close(torch.tensor(list(table.inv_freq)), reference, rtol=1.3e-7, atol=0)


EXACT_ROLES = {"final_norm", "attention_norm", "ffn_norm", "q_norm", "k_norm", "router", "router_select_bias"}
EXACT_ROLES |= {"q_bias", "k_bias", "v_bias", "shared_output_gate"}
LAYER_ROLES = {
    "mixtral": "attention_norm q k v o ffn_norm router",
    "qwen2_moe": "attention_norm q k v o q_bias k_bias v_bias ffn_norm router shared_gate shared_up shared_down "
    "shared_output_gate",
    "qwen3_moe": "attention_norm q k v o q_norm k_norm ffn_norm router",
    "olmoe": "attention_norm q k v o q_norm k_norm ffn_norm router",
    "glm4_moe": "attention_norm q k v o q_bias k_bias v_bias q_norm k_norm ffn_norm router router_select_bias "
    "shared_gate shared_up shared_down",
}


def test_the_dense_tensors_in_order(family: str, model: ModelSource) -> None:
    names = [dense.name for dense in model.dense]
    assert names[:3] == ["embedding", "head", "final_norm"]
    rest = []
    for layer in range(3):
        roles = LAYER_ROLES[family].split()
        if layer not in SPARSE.get(family, [0, 1, 2]):
            roles = [*roles[: roles.index("ffn_norm") + 1], "ffn_gate", "ffn_up", "ffn_down"]
        rest += [f"layers.{layer}.{role}" for role in roles]
    assert names[3:] == rest


def test_classes_follow_roles(model: ModelSource) -> None:
    for dense in model.dense:
        role = dense.name.split(".")[-1]
        if role in EXACT_ROLES:
            assert dense.tensor_class == "exact"
        elif role in ("embedding", "head"):
            assert dense.tensor_class == role
        else:
            expected = {"q": "attention", "k": "attention", "v": "attention", "o": "attention"}
            assert dense.tensor_class == expected.get(role, role.split("_")[0])


def test_every_number_of_the_checkpoint_is_reached(family: str, folder: Path, model: ModelSource) -> None:
    """Law 3, seen from outside: names that the spec promises, shapes, and no tensor left over."""
    names = FAMILIES[family].names
    with Checkpoint.open(folder) as checkpoint:
        reached = set()
        for dense in model.dense:
            assert dense.source_names == (dense_name(names, dense.role, dense.layer),)
            block = read_matrix(checkpoint, dense.source, 0, dense.rows)
            assert bytes(block.buffer) == bytes(checkpoint.read(dense.source.tensor))
            assert (block.rows, block.cols, block.row_stride) == (dense.rows, dense.cols, dense.cols)
            reached |= set(dense.source_names)
        for layer in model.expert_layers:
            for expert in range(layer.experts):
                for kind in KINDS:
                    source = layer.matrices(expert, kind)
                    assert source.tensor == expert_name(names, layer.layer, expert, kind)
                    shape = checkpoint.tensors[source.tensor].shape
                    down = kind == pb.RecordPart.KIND_DOWN
                    assert shape == ((HIDDEN, layer.intermediate) if down else (layer.intermediate, HIDDEN))
                    reached.add(source.tensor)
        assert reached == set(checkpoint.tensors)
    assert model.skipped == ()
    assert model.warnings == ()


def test_gate_and_up_are_not_swapped(folder: Path, model: ModelSource) -> None:
    """The reference multiplies silu of the first half of its fused gate_up_proj."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder)
    layer = model.expert_layers[-1]
    fused = reference.model.layers[layer.layer].mlp.experts
    with Checkpoint.open(folder) as checkpoint:
        for kind, expected in (
            (KINDS[0], fused.gate_up_proj[2, : layer.intermediate]),
            (KINDS[1], fused.gate_up_proj[2, layer.intermediate :]),
            (KINDS[2], fused.down_proj[2]),
        ):
            block = read_matrix(checkpoint, layer.matrices(2, kind), 0, expected.shape[0])
            assert torch.equal(torch.frombuffer(block.buffer, dtype=torch.float32).view(expected.shape), expected)


def test_a_model_that_repeats_one_token_is_no_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testkit.checkpoints._randomise", lambda model, _: model.lm_head.weight.data.zero_())
    with pytest.raises(ValueError, match="1 distinct ones"):
        tiny_checkpoint("mixtral", tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_width_checkpoints(dtype: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("glm4_moe", tmp_path, dtype=dtype)
    with Checkpoint.open(folder) as checkpoint:
        model = resolve(checkpoint)
        embedding = read_matrix(checkpoint, model.dense[0].source, 0, 1)
        bias = next(dense for dense in model.dense if dense.role == pb.TENSOR_ROLE_ROUTER_SELECT_BIAS)
        assert read_matrix(checkpoint, bias.source, 0, 1).source_type == "F32"
    assert embedding.source_type == {"bfloat16": "BF16", "float16": "F16"}[dtype]
