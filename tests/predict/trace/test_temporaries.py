"""What kernels allocate for themselves, as PyTorch's CUDA build 2.13 did (tests/cuda_build), for a card with 46 SMs."""

import pytest
import torch

from foretrain.hardware.catalogue import find
from foretrain.predict.trace.card.torch_cuda import Card
from foretrain.predict.trace.kernels import temporaries as kernels
from foretrain.predict.trace.kernels.reductions import reduction_buffers
from foretrain.predict.trace.tracer import Result, Step, Tracer, Workspace

CARD = Card.of(find("RTX 4070"))
OUT = Result(0)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(B: int, H: int, T: int, D: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(B, T, H, D, dtype=dtype, device="meta").transpose(1, 2)


def embedding(vocabulary: int, tokens: int, width: int) -> list[Step]:
    return kernels.RULES["embedding_dense_backward"](
        CARD, (meta(tokens, width), meta(tokens, dtype=torch.int64), vocabulary)
    )


def test_embeddings_sum_rows_after_their_result_is_there() -> None:
    """The order decides what is reserved: with the buffers before the result a run of 124M was 13% too low."""
    n = 32768
    assert embedding(1013, 3072, 240) == [Result(0)]
    assert embedding(1013, 4096, 240) == [
        n, n, n, 72191, -72191, -n, OUT, n, 8, n, 1279, -1279, -n, 8104, 8104, 1279, -1279, 8, 11376, 1365120,
    ]  # fmt: skip
    assert embedding(65, 4096, 384)[3:5] == [4607, -4607]
    assert embedding(65, 4096, 384)[-2:] == [3792, 3792]


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "sort", "unique", "sums"),
    [
        (3073, 1000, 55295, 1279, 1279), (6144, 1000, 104959, 1535, 1279), (12288, 50304, 205311, 1791, 1279),
        (16384, 50304, 271871, 2047, 1535), (32768, 50304, 538111, 2815, 1791), (65536, 50304, 1071615, 4351, 2047),
        (4096, 100_000, 74239, 1279, 1279),
    ],
)  # fmt: skip
def test_sorts_and_scans_take_what_cub_asks_for(
    tokens: int, vocabulary: int, sort: int, unique: int, sums: int
) -> None:
    steps = embedding(vocabulary, tokens, 64)
    lists = 8 * tokens
    assert [-step for step in steps if isinstance(step, int) and step < 0] == [sort, lists, unique, lists, sums]


@pytest.mark.parametrize(
    ("shape", "key_heads", "wanted"),  # allocations of an H100, torch 2.11 with CUDA 13.0
    [((8, 12, 1024, 64), 12, 25_559_296), ((16, 12, 1024, 48), 12, 38_535_424), ((16, 6, 512, 64), 6, 12_779_776),
     ((8, 12, 1024, 64), 4, 50_725_120)],
)  # fmt: skip
def test_cudnn_sums_the_gradient_of_queries_in_a_workspace(
    shape: tuple[int, int, int, int], key_heads: int, wanted: int
) -> None:
    query, key = heads(*shape), heads(shape[0], key_heads, *shape[2:])
    backward = kernels.RULES["_scaled_dot_product_cudnn_attention_backward"]
    assert backward(CARD, (query, query, key, key)) == [Result(0), Result(1), Result(2), wanted]
    forward = kernels.RULES["_scaled_dot_product_cudnn_attention"]
    assert forward(CARD, (query, key, key, None, True)) == [Result(2), Result(3), Result(0), Result(1), 256]
    assert Result(1) not in forward(CARD, (query, key, key, None, False))


def test_flash_attention_splits_keys_where_there_are_few_rows() -> None:
    flash = kernels.RULES["_scaled_dot_product_flash_attention"]
    few, many = heads(1, 4, 1024, 64), heads(2, 6, 256, 64)
    assert flash(CARD, (few, few, few, 0.0)) == [Result(0), Result(1), 65536, 4194304, Result(2), Result(3)]
    assert flash(CARD, (many, many, many, 0.0)) == [Result(0), Result(1), Result(2), Result(3)]
    assert flash(CARD, (few, few, few, 0.1)) == [Result(0), Result(1), 16, Result(2), Result(3), -16]


def test_flash_attention_copies_a_gradient_of_another_layout() -> None:
    backward = kernels.RULES["_scaled_dot_product_flash_attention_backward"]
    q = heads(4, 3, 256, 56)
    own = [4 * 4 * 3 * 256, 4 * 4 * 3 * 256 * 64]
    assert backward(CARD, (q, q, q, q, q)) == [Result(0), Result(1), Result(2), *own]
    padded = meta(4, 3, 256, 56, dtype=torch.bfloat16)  # as padding leaves it
    assert backward(CARD, (padded, q, q, q, padded))[:2] == [344064, 344064]


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((1, 4, 1024, 64), torch.float32, [1048576, 16384, 16384, -16384, -1048576, 1049600]),
        ((4, 1, 1024, 80), torch.float32, [1310720, 16384, -1310720, 2099200]),
        ((2, 2, 1024, 256), torch.float32, [4194304, 16384, 16384, -16384, -4194304, 4198400]),
        ((2, 6, 256, 64), torch.bfloat16, [12288, 787200]),
        ((2, 3, 1000, 72), torch.bfloat16, [24000, 3147264]),
        ((2, 3, 1000, 128), torch.bfloat16, [24000, 9440256]),
    ],
)
def test_efficient_attention_sums_query_gradients_in_blocks(
    shape: tuple[int, int, int, int], dtype: torch.dtype, expected: list[Step]
) -> None:
    q = heads(*shape, dtype=dtype)
    steps = kernels.RULES["_scaled_dot_product_efficient_attention_backward"](CARD, (q, q, q, q))
    assert steps == [Result(0), Result(1), Result(2), *expected]


def test_results_come_in_the_order_of_the_kernel() -> None:
    dropout, norms = kernels.RULES["native_dropout"], kernels.RULES["_foreach_norm"]
    assert dropout(CARD, (meta(4), 0.1, True)) == [Result(1), Result(0)]  # the mask first
    assert norms(CARD, ([meta(100), meta(70_000), meta(50)],)) == [24, Result(0), Result(1), Result(2)]


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((4096, 768), [0], [25165824, 24]), ((8192, 768), [0], [36175872, 24]), ((70_000, 384), [0], [36175872, 12]),
        ((1024, 600), [0], [4915200, 20]), ((4096, 768), None, [552, 4]), ((70_000, 384), None, [824, 4]),
        ((256, 80), [0], []), ((4096, 768), [1], []), ((16384, 768), -1, []),
    ],
)  # fmt: skip
def test_reductions_share_a_result_among_blocks(shape: tuple[int, ...], dims: object, expected: list[int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert reduction_buffers(CARD, "sum", meta(*shape, dtype=dtype), dims) == expected


# -- how a trace takes them ------------------------------------------------------------------------------------


def events(tracer: Tracer) -> list[int]:
    sizes = tracer.record.sizes
    return [sizes[event] if event >= 0 else -sizes[~event] for event in tracer.record.events]


def test_a_kernels_memory_is_taken_and_freed_where_it_says() -> None:
    tracer = Tracer("cpu")
    a, b = torch.empty(100), torch.empty(25)
    tracer._allocate("op", [a, b], [64, Result(1), 32, -64, Result(0), Workspace(7, "kept")])
    assert events(tracer) == [64, 100, 32, -64, 400, 7, -32]
    assert tracer.record.tags[4] == ("workspace", "kept")


def test_results_without_steps_come_at_once() -> None:
    tracer = Tracer("cpu")
    a, b, c = torch.empty(100), torch.empty(25), torch.empty(1)
    tracer._allocate("op", [a, b], [])
    assert events(tracer) == [400, 100]
    tracer._allocate("op", [c], [Result(5)])
    assert events(tracer) == [400, 100, 0]
