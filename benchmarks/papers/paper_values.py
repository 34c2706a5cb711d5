"""Published values that the simulation is compared with, and the sources of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


READING_ERROR_MS = 2.0  # of a bar of COMET's figure 9, read from the image
TIE_MS = 2 * READING_ERROR_MS  # each bar of a pair has a reading error
SYSTEMS = ("Megatron-TE", "Megatron-Cutlass", "FasterMoE", "Tutel", "COMET")


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value of a figure: published, None if the paper shows no number, and simulated."""

    figure: str
    cell: str
    system: str
    published: float | None
    simulated: float
    is_fitted: bool = False

    @property
    def error(self) -> float | None:
        """Relative error of the simulated value."""
        return self.simulated / self.published - 1 if self.published else None


def make_values(
    figure: str, rows: Iterable[tuple[str, str, float | None, float]], *, fitted: Sequence[str] = ()
) -> list[Value]:
    """Return values of rows (cell, system, published, simulated); ``fitted`` lists cells."""
    return [
        Value(
            figure=figure,
            cell=cell,
            system=system,
            published=published,
            simulated=simulated,
            is_fitted=cell in fitted,
        )
        for cell, system, published, simulated in rows
    ]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model of COMET's table 2."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


MODELS = (
    Model(
        name="Mixtral", num_layers=32, num_experts=8, top_k=2, hidden_size=4096,
        intermediate_size=14336,
    ),
    Model(
        name="Qwen2", num_layers=24, num_experts=64, top_k=4, hidden_size=2048,
        intermediate_size=1408,
    ),
    Model(
        name="Phi3.5", num_layers=32, num_experts=16, top_k=2, hidden_size=4096,
        intermediate_size=6400,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """A cell of COMET's figure 9: forward times of a model in ms, by system."""

    model: Model
    tp_size: int
    num_tokens: int  # M: the tokens of a data-parallel rank
    times_ms: dict[str, float]
    attention_ms: float  # the hatched part: everything but the MoE layers

    @property
    def name(self) -> str:
        return f"{self.model.name} ({self.tp_size},{8 // self.tp_size}) M={self.num_tokens}"


# Figure 9, read from the image. A line is (TP, EP), then M. A cell is Megatron-TE,
# Megatron-Cutlass, FasterMoE ("-": it supports EP only), Tutel and COMET; attention. The models are
# in the order of ``MODELS``.
_FIGURE_9 = """
1 4096 227/222/233/218/178;46 111/100/227/118/62;34  185/182/189/175/113;42
1 8192 422/419/417/377/349;84 146/141/242/150/100;35 337/335/310/273/222;84
2 4096 158/154/-/168/106;55   124/104/-/108/69;42    152/140/-/147/89;55
2 8192 273/270/-/226/200;55   132/113/-/122/77;42    224/218/-/181/155;54
4 4096 148/136/-/140/83;55    160/112/-/108/68;43    180/136/-/135/87;55
4 8192 188/181/-/169/127;55   169/114/-/110/68;43    194/161/-/145/110;55
8 4096 174/133/-/128/87;54    164/117/-/104/66;42    185/135/-/127/88;54
8 8192 182/143/-/139/89;55    171/126/-/105/68;41    194/147/-/134/89;56
"""


def figure_9() -> list[EndToEnd]:
    """Return the 24 cells of COMET's figure 9."""
    cells = []
    for line in _FIGURE_9.split("\n")[1:-1]:
        tp_size, num_tokens, *texts = line.split()
        for model, text in zip(MODELS, texts, strict=True):
            times, attention = text.split(";")
            pairs = zip(SYSTEMS, times.split("/"), strict=True)
            cells.append(
                EndToEnd(
                    model=model,
                    tp_size=int(tp_size),
                    num_tokens=int(num_tokens),
                    times_ms={name: float(time) for name, time in pairs if time != "-"},
                    attention_ms=float(attention),
                )
            )
    return cells


# Forward times of one layer in ms, in the file timing_results.csv of COMET's artifact (the fork
# ZSL98/Megatron-LM). TP 8, 8192 tokens, experts of Mixtral. The file does not name the GPU; the
# times fit the H800. Columns: number of experts, top-k, then the systems in the order of
# ``SYSTEMS``. FasterMoE and Tutel ran with EP 8 there.
ARTIFACT = (
    (8, 2, 3.827, 2.979, 2.432, 2.399, 1.618),
    (8, 3, 4.630, 3.771, 2.924, 3.004, 2.084),
    (8, 4, 5.458, 4.363, 3.476, 3.578, 2.554),
    (8, 5, 6.378, 5.041, 3.949, 4.156, 2.956),
    (16, 2, 4.108, 3.199, 3.151, 2.740, 1.654),
    (16, 3, 4.781, 3.876, 3.650, 3.498, 2.120),
    (16, 4, 5.750, 4.459, 3.975, 3.669, 2.586),
    (16, 5, 6.626, 5.133, 4.643, 4.430, 3.058),
    (32, 2, 4.745, 3.427, 4.415, 2.955, 1.794),
    (32, 3, 5.258, 3.998, 4.862, 3.370, 2.268),
    (32, 4, 5.916, 4.607, 5.229, 4.230, 2.661),
    (32, 5, 6.756, 5.355, 5.930, 4.688, 3.169),
    (64, 2, 5.964, 3.751, 7.065, 2.853, 2.075),
    (64, 3, 6.550, 4.387, 7.798, 4.065, 2.817),
    (64, 4, 7.194, 5.178, 7.649, 4.408, 2.915),
    (64, 5, 7.911, 5.709, 8.463, 5.010, 3.808),
)

# COMET, text of section 5 and the abstract.
LAYER_SPEEDUP = 1.96  # average of single layers
MODEL_SPEEDUP = 1.71  # average of models, end to end
FIGURE_9_REDUCTION = {  # average reduction of latency by COMET, %
    "Megatron-TE": 42.6, "Megatron-Cutlass": 34.1, "FasterMoE": 44.4, "Tutel": 31.8,
}  # fmt: skip
FIGURE_8 = {(8, 4096): 18, (8, 16384): 26, (4, 16384): 46}  # (TP, M): best number of comm CTAs
FIGURE_10 = (1.28, 2.37)  # least and most speed-up, EP 8, Mixtral experts, over M
FIGURE_11 = {"FasterMoE": 29.2, "Tutel": 68.6, "COMET": 86.5}  # hidden communication, %
FIGURE_13 = (1.16, 1.83)  # least and most speed-up, EP 8, M 16384, over experts and top-k
FIGURE_14 = (1.19, 1.46)  # least and most speed-up on L20, 8 experts, top-k 4, M 8192

# Lancet, section 7.1: average and best speed-up over the baselines, by gate and GPU.
LANCET_SPEEDUP = {
    ("switch", "A100"): (1.17, 1.21),
    ("switch", "V100"): (1.22, 1.30),
    ("prioritized", "A100"): (1.17, 1.24),
    ("prioritized", "V100"): (1.21, 1.24),
}
# Largest reduction of communication that nothing overlaps, %, by baseline and GPU.
LANCET_REDUCTION = {
    ("RAF", "A100"): 69.0, ("RAF", "V100"): 83.0, ("Tutel", "A100"): 66.0, ("Tutel", "V100"): 77.0,
}  # fmt: skip
LANCET_COMM_OVER_EXPERTS = 3.36  # largest all-to-all over expert time on V100, section 2.2
