"""Microseconds of a grouped GEMM, an all-to-all, a pass over memory: a roofline with latencies."""

from typing import final

from halley.cost.hardware import Hardware


@final
class Predictor:
    """Predicts how long the parts of a layer take on given hardware."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def grouped_gemm_us(
        self, num_rows: float, num_groups: int, *, inner: int, outer: int, itemsize: int
    ) -> float:
        """Predict ``num_rows`` rows times ``num_groups`` matrices of (inner, outer).

        The larger of arithmetic and of the bytes that must move: rows in, rows out, all weights.
        """
        compute_s = 2.0 * num_rows * inner * outer / self.hardware.gemm_flops_per_s
        num_bytes = itemsize * (num_rows * (inner + outer) + num_groups * inner * outer)
        memory_s = num_bytes / self.hardware.memory_bytes_per_s
        return max(compute_s, memory_s) * 1e6 + self.hardware.launch_us

    def all_to_all_us(self, num_bytes: float) -> float:
        """Predict an all-to-all in which each rank sends ``num_bytes`` to the others together."""
        return self.hardware.link_latency_us + num_bytes / self.hardware.link_bytes_per_s * 1e6

    def memory_us(self, num_bytes: float, *, num_ops: int = 1) -> float:
        """Predict ``num_ops`` element-wise operations that move ``num_bytes`` together."""
        launches_us = num_ops * self.hardware.launch_us
        return max(num_bytes / self.hardware.memory_bytes_per_s * 1e6, launches_us)
