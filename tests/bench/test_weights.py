from bench.cases import EngineSpec
from bench.weights import file_name, gguf_tensors
from tests.lively import SMALL, lively_checkpoint


def test_every_tensor_has_one_name_of_ggufs() -> None:
    tensors = lively_checkpoint().tensors
    named = dict(gguf_tensors(tensors))
    assert len(named) == len(tensors)
    assert {name.split(".")[0] for name in named} == {
        "token_embd",
        "position_embd",
        "output_norm",
        "blk",
    }


def test_dense_weights_are_turned_and_nothing_else() -> None:
    tensors = lively_checkpoint().tensors
    named = dict(gguf_tensors(tensors))
    c = SMALL.n_embd
    assert named["blk.1.attn_qkv.weight"].shape == (3 * c, c)
    assert named["blk.1.attn_qkv.weight"].equal(tensors["h.1.attn.c_attn.weight"].t())
    assert named["blk.0.ffn_down.bias"].equal(tensors["h.0.mlp.c_proj.bias"])
    assert named["token_embd.weight"].equal(tensors["wte.weight"])


def test_converted_models_lie_beside_each_other() -> None:
    assert file_name(EngineSpec("ctranslate2", "int8")) == "ctranslate2-int8"
    assert file_name(EngineSpec("llamacpp", "q8_0")) == "llamacpp-q8_0.gguf"
