"""What the figures of every card in the catalogue must be like."""

from foretrain.hardware.catalogue import Gpu

TOLERANCE = 0.03


def close(derived: float, stated: float) -> bool:
    return abs(derived / stated - 1) <= TOLERANCE


def assert_figures_follow_a_second_way(gpu: Gpu) -> None:
    assert gpu.memory_bus_bits
    assert gpu.memory_gbps_per_pin
    assert gpu.bandwidth_gb_per_s
    assert close(gpu.memory_bus_bits / 8 * gpu.memory_gbps_per_pin, gpu.bandwidth_gb_per_s)
    if gpu.fp16_flop_per_clock_per_sm:
        assert gpu.sm_count
        assert gpu.boost_clock_ghz
        derived = gpu.sm_count * gpu.fp16_flop_per_clock_per_sm * gpu.boost_clock_ghz / 1e3
        stated = gpu.fp16_dense_tflops or gpu.fp16_acc16_dense_tflops  # Pascal has no fp32-accumulating path
        assert stated
        assert close(derived, stated)
    if gpu.fp32_tflops and gpu.fp32_flop_per_clock_per_sm:
        clock = gpu.fp32_clock_ghz or gpu.boost_clock_ghz
        assert gpu.sm_count
        assert clock
        assert close(gpu.sm_count * gpu.fp32_flop_per_clock_per_sm * clock / 1e3, gpu.fp32_tflops)


def assert_ratios_between_dtypes(gpu: Gpu) -> None:
    """Sparse figures, CUDA-core rates and copied rows show here: they break a ratio that the hardware fixes."""
    fp16 = gpu.fp16_dense_tflops
    if fp16 and gpu.bf16_dense_tflops:
        assert close(fp16, gpu.bf16_dense_tflops)
    if fp16 and gpu.tf32_dense_tflops:
        assert close(fp16 / 2, gpu.tf32_dense_tflops)
    if fp16 and gpu.fp8_dense_tflops:
        assert close(fp16 * 2, gpu.fp8_dense_tflops)
    if fp16 and gpu.fp16_acc16_dense_tflops:
        geforce = gpu.name.startswith("RTX")
        assert close(fp16 * (2 if geforce else 1), gpu.fp16_acc16_dense_tflops)
