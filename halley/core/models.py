"""Named models: the published shapes that papers and benchmarks use, each with its source.

An entry says where Halley's model lacks a part of the published model. Such an entry has no
``hf_family``; it serves benchmarks, and weights cannot be exported. Balance coefficients are the
published ones. Their effect differs: Halley's loss is 1 per balanced layer. Hugging Face pools the
layers and counts each of the K choices, so an equal effect takes the coefficient times K / layers.
"""

from halley.core.config import ModelConfig, MoEConfig, RouterConfig
from halley.core.field_types import unknown_name


NAMED_MODELS: dict[str, ModelConfig] = {
    model.name: model
    for model in (
        # For tests and demos, with the equations of Qwen3-MoE.
        ModelConfig(
            name="tiny",
            vocab_size=256,
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            qk_norm="head",
            hf_family="qwen3_moe",
            moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=256),
        ),
        # Source: config.json of mistralai/Mixtral-8x7B-v0.1.
        ModelConfig(
            name="mixtral-8x7b",
            vocab_size=32000,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope_theta=1e6,
            norm_eps=1e-5,
            hf_family="mixtral",
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                intermediate_size=14336,
                router=RouterConfig(balance_coefficient=0.02),
            ),
        ),
        # Source: config.json of microsoft/Phi-3.5-MoE-instruct. Halley has RMSNorm and a softmax
        # router in place of its LayerNorm and SparseMixer router.
        ModelConfig(
            name="phi-3.5-moe",
            vocab_size=32064,
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            norm_eps=1e-5,
            attention_bias=True,
            moe=MoEConfig(
                num_experts=16,
                top_k=2,
                intermediate_size=6400,
                router=RouterConfig(normalize=False),
            ),
        ),
        # Source: config.json of Qwen/Qwen1.5-MoE-A2.7B, with the 64 experts (not 60) that COMET
        # (arXiv:2502.19811) uses in Table 2; 64 divides over 2 to 64 ranks.
        ModelConfig(
            name="qwen2-moe",
            vocab_size=151936,
            hidden_size=2048,
            num_layers=24,
            num_heads=16,
            num_kv_heads=16,
            head_dim=128,
            rope_theta=1e6,
            attention_bias=True,
            hf_family="qwen2_moe",
            moe=MoEConfig(
                num_experts=64,
                top_k=4,
                intermediate_size=1408,
                shared_intermediate_size=5632,
                shared_gate=True,
                router=RouterConfig(normalize=False, balance_coefficient=0.001),
            ),
        ),
        # Source: config.json of Qwen/Qwen3-30B-A3B.
        ModelConfig(
            name="qwen3-30b-a3b",
            vocab_size=151936,
            hidden_size=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            rope_theta=1e6,
            qk_norm="head",
            hf_family="qwen3_moe",
            moe=MoEConfig(
                num_experts=128,
                top_k=8,
                intermediate_size=768,
                router=RouterConfig(balance_coefficient=0.001),
            ),
        ),
        # Source: config.json of allenai/OLMoE-1B-7B-0924.
        ModelConfig(
            name="olmoe",
            vocab_size=50304,
            hidden_size=2048,
            num_layers=16,
            num_heads=16,
            num_kv_heads=16,
            head_dim=128,
            norm_eps=1e-5,
            qk_norm="full",
            hf_family="olmoe",
            moe=MoEConfig(
                num_experts=64,
                top_k=8,
                intermediate_size=1024,
                router=RouterConfig(normalize=False),
            ),
        ),
        # Source: config.json of openai/gpt-oss-20b. Halley has plain attention and SwiGLU in place
        # of its attention sinks, sliding windows and clamped SwiGLU.
        ModelConfig(
            name="gpt-oss-20b",
            vocab_size=201088,
            hidden_size=2880,
            num_layers=24,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            rope_theta=150000.0,
            norm_eps=1e-5,
            attention_bias=True,
            moe=MoEConfig(num_experts=32, top_k=4, intermediate_size=2880, expert_bias=True),
        ),
        # Source: DeepSeek-V3 (arXiv:2412.19437), section 4.2. Halley has plain multi-head attention
        # in place of its latent attention; the MoE layer is the same.
        ModelConfig(
            name="deepseek-v3",
            vocab_size=129280,
            hidden_size=7168,
            num_layers=61,
            num_heads=128,
            num_kv_heads=128,
            head_dim=128,
            num_dense_layers=3,
            dense_intermediate_size=18432,
            moe=MoEConfig(
                num_experts=256,
                top_k=8,
                intermediate_size=2048,
                shared_intermediate_size=2048,
                router=RouterConfig(
                    kind="sigmoid",
                    num_groups=8,
                    num_limited_groups=4,
                    scaling_factor=2.5,
                    balance_coefficient=0.0001,
                ),
            ),
        ),
    )
}


def find_model(name: str) -> ModelConfig:
    """Return the named model.

    Raises:
        ValueError: no model has that name; the message lists all names.
    """
    if name in NAMED_MODELS:
        return NAMED_MODELS[name]
    raise ValueError(unknown_name(name, NAMED_MODELS, what="model"))
