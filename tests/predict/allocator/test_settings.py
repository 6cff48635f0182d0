"""The allocator's settings: what PYTORCH_CUDA_ALLOC_CONF may say, held against PyTorch's own parser."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.predict.allocator.settings import INTERVALS, Settings, driver_backend, merged

MIB, GIB = 1 << 20, 1 << 30


def test_settings_are_read_as_the_documentation_writes_them() -> None:
    text = (
        " max_split_size_mb: 64, garbage_collection_threshold:0.8 ,expandable_segments:True,"
        "roundup_power2_divisions:[256:1,512:2,>:4],pinned_use_background_threads:True,backend:native"
    )
    parsed = Settings.parse(text)
    assert parsed.max_split_bytes == 64 * MIB
    assert (parsed.garbage_collection_threshold, parsed.expandable_segments) == (0.8, True)
    assert parsed.roundup_power2_divisions == (1,) * 9 + (2,) + (4,) * 6
    assert parsed.divisions_of(600 * MIB) == 2
    assert parsed.divisions_of(500 * MIB) == 1
    assert parsed.divisions_of(1 << 45) == 4
    assert Settings.parse("") == Settings()


def test_the_large_segments_size_counts_wherever_it_stands() -> None:
    parsed = Settings.parse("max_split_size_mb:40,large_segment_size_mb:30")
    assert (parsed.large_segment_bytes, parsed.max_non_split_rounding_bytes) == (30 * MIB, 30 * MIB)


def test_the_old_variable_wins_even_if_empty() -> None:
    old, new = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert Settings.of_environment({}) == Settings()
    driver = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync,max_split_size_mb:64"}
    assert Settings.of_environment(driver) == Settings(max_split_bytes=64 * MIB)
    assert driver_backend(driver) == "PYTORCH_ALLOC_CONF"
    assert driver_backend({**driver, "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}) == ""
    assert driver_backend({"PYTORCH_ALLOC_CONF": "what"}) == ""
    assert Settings.of_environment(new).expandable_segments
    assert Settings.of_environment(new | old) == Settings(max_split_bytes=64 * MIB)
    assert Settings.of_environment(new | {"PYTORCH_CUDA_ALLOC_CONF": ""}) == Settings()


def test_a_memory_fraction_is_a_cap_on_the_device() -> None:
    assert Settings.parse("per_process_memory_fraction:0.5").cap_bytes(3 * GIB + 1) == 3 * GIB // 2
    assert Settings().cap_bytes(GIB) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_split_size_mb:19", "max_split_size_mb:19 is wrong: .* 20"),
        ("max_split_size_mb:abc", "max_split_size_mb:abc is wrong: a whole number"),
        ("max_split_size_mb:128MB", "max_split_size_mb:128MB"),
        ("max_split_size_mb:-1", "max_split_size_mb:-1"),
        ("max_split_size_mb:0", "max_split_size_mb:0"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 is wrong: it must be more than 10"),
        ("max_split_size_mb:25,large_segment_size_mb:30", "max_split_size_mb:25 is wrong: .* 30"),
        ("max_non_split_rounding_mb:5", "max_non_split_rounding_mb:5"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold:1.0"),
        ("garbage_collection_threshold:0", "garbage_collection_threshold:0"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold:nan"),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction:1.5"),
        ("expandable_segments:true", "expandable_segments:true is wrong: True or False"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions:3"),
        ("roundup_power2_divisions:0", "roundup_power2_divisions:0"),
        ("roundup_power2_divisions:[3:4]", "sizes in the list"),
        ("roundup_power2_divisions:[256:3]", "divisions are powers of two"),
        ("roundup_power2_divisions:[256]", "pairs such as"),
        ("roundup_power2_divisions:[256:1", "key:value pairs"),
        ("backend:cudaMallocAsync", "cannot be simulated"),
        ("backend:other", "native and cudaMallocAsync"),
        ("max_split_size:128", "max_split_size:128 is unknown"),
        ("max_split_size_mb", "key:value pairs"),
        ("max_split_size_mb=128", "key:value pairs"),
        ("max_split_size_mb:64;expandable_segments:True", "key:value pairs"),
    ],
)
def test_a_bad_setting_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        Settings.parse(text)
    assert "\n" not in str(caught.value)


divisions = st.one_of(
    st.just(()), st.lists(st.sampled_from([0, 1, 2, 4, 8, 64]), min_size=INTERVALS, max_size=INTERVALS).map(tuple)
)


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    large = draw(st.sampled_from([11, 12, 20, 64]))
    above = st.integers(large, 4096)
    return Settings(
        large_segment_bytes=large * MIB,
        max_split_bytes=draw(st.one_of(st.just(Settings().max_split_bytes), above.map(lambda n: n * MIB))),
        max_non_split_rounding_bytes=draw(above) * MIB,
        garbage_collection_threshold=draw(st.floats(0, 1, exclude_max=True)),
        per_process_memory_fraction=draw(st.floats(0, 1)),
        roundup_power2_divisions=draw(divisions),
        expandable_segments=draw(st.booleans()),
        throw_on_cudamalloc_oom=draw(st.booleans()),
    )


@given(any_settings())
def test_settings_survive_their_text(chosen: Settings) -> None:
    assert Settings.parse(chosen.text()) == chosen


# -- PyTorch's own parser ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch_parser() -> Iterator[Any]:
    """PyTorch's parser, which its CPU build has too, and the function that reads the divisions back."""
    torch = pytest.importorskip("torch")
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    try:
        read = getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError):
        read = None
    if parse is None or read is None:
        pytest.skip("this build of torch does not show its allocator's settings")
    read.restype, read.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    yield parse, lambda: tuple(read(MIB << i) for i in range(INTERVALS))
    parse("large_segment_size_mb:20,expandable_segments:False")


@pytest.mark.parametrize(
    "text",
    [
        "roundup_power2_divisions:[256:1,512:2,>:4]",
        "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[>:4]",
        "roundup_power2_divisions:[256:0,>:2,1024:8]",
        "roundup_power2_divisions:[65536:4,>:2]",
        "roundup_power2_divisions:[512:2,256:4]",
        "roundup_power2_divisions:[]",
    ],
)
def test_divisions_are_those_of_torch(torch_parser: Any, text: str) -> None:
    parse, read = torch_parser
    parse(text)
    assert Settings.parse(text).roundup_power2_divisions == read()


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "max_split_size_mb:20",
        "large_segment_size_mb:10",
        "large_segment_size_mb:11",
        "large_segment_size_mb:30,max_split_size_mb:25",
        "max_split_size_mb:25,large_segment_size_mb:30",
        "large_segment_size_mb:12,max_split_size_mb:12",
        "max_non_split_rounding_mb:19",
        "max_non_split_rounding_mb:20",
        "garbage_collection_threshold:0.999",
        "garbage_collection_threshold:1e-3",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:0",
        "expandable_segments:False",
        "expandable_segments:true",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[256:0]",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[4:3]",
        "max_split_size_mb: 64 , expandable_segments : True",
        "max_split_size_mb:64,",
        "max_split_size_mb",
    ],
)
def test_what_torch_refuses_is_refused(torch_parser: Any, text: str) -> None:
    parse, _ = torch_parser
    parse("large_segment_size_mb:20")
    try:
        parse(text)
        accepted = True
    except (ValueError, RuntimeError):
        accepted = False
    try:
        Settings.parse(text)
        assert accepted
    except ValueError:
        assert not accepted


def test_environment_settings_win_over_those_of_the_run() -> None:
    own = "expandable_segments:True,max_split_size_mb:64"
    assert merged("", {"PYTORCH_ALLOC_CONF": "x:1"}) == {}
    assert merged(own, {}) == {"PYTORCH_ALLOC_CONF": own}
    theirs = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    both = Settings.of_environment({**theirs, **merged(own, theirs)})
    assert both.expandable_segments
    assert both.max_split_bytes == 128 << 20
