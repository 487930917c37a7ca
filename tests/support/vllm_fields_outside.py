"""The classes of vLLM's configuration, 0.26 to 0.33, with no field in the fingerprint.

By class: its path in VllmConfig, the reason, and its fields if a new one must be noticed.
"name:28-" is a field that exists from vLLM 0.28 on, "name:-27" until 0.27.
"""

from __future__ import annotations

KERNEL = "another kernel, schedule or collective for the same function at the same precision"
MEMORY = "how much memory is used and for what, not what is in it"
SCHEDULING = "which requests and tokens are computed when, and which blocks the GPU keeps"
SERVING = "requests, tokens, sampling and outputs; the tokens are in the block hashes"
REPORTS = "logs, metrics, traces, profiles"
PLACEMENT = "processes, devices, addresses and ports"
LOADING = "how weights are read, not which"
DERIVED = "follows from other fields"
REFUSED = "kvferry refuses KV caches in host memory"

OUTSIDE: dict[str, tuple[str, str, str]] = {
    "HiSparseConfig": (
        "attention_config.hisparse_config",
        REFUSED,
        "device_buffer_size eager_host_mirror",
    ),
    "CompilationConfig": (
        "compilation_config",
        KERNEL,
        "mode debug_dump_path cache_dir compile_cache_save_format backend custom_ops "
        "ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder "
        "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_max_frames_per_batch compile_sizes compile_ranges_endpoints "
        "inductor_compile_config inductor_passes cudagraph_mode cudagraph_num_of_warmups "
        "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
        "use_inductor_graph_partition pass_config max_cudagraph_capture_size "
        "dynamic_shapes_config local_cache_dir fast_moe_cold_start enabled_custom_ops "
        "disabled_custom_ops traced_files compilation_time encoder_compilation_time "
        "static_forward_context static_all_moe_layers cudagraph_decoder_replay:32- "
        "decoder_replay_cudagraph_capture_sizes:32- decoder_replay_trim_threshold:32-",
    ),
    "PassConfig": (
        "compilation_config.pass_config",
        KERNEL,
        "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops enable_sp:-31 "
        "fuse_gemm_comms:-31 fuse_allreduce_rms enable_qk_norm_rope_fusion "
        "fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache "
        "fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num "
        "fi_allreduce_fusion_max_size_mb sp_min_token_num:-31",
    ),
    "DynamicShapesConfig": (
        "compilation_config.dynamic_shapes_config",
        KERNEL,
        "type evaluate_guards assume_32_bit_indexing",
    ),
    "EngramConfig": (
        "engram_config",
        MEMORY,
        "cpu_offload embedding_across_dp dp_shared_memory use_thp:31-",
    ),
    "KernelConfig": (
        "kernel_config",
        KERNEL,
        "ir_op_priority enable_flashinfer_autotune enable_cutedsl_warmup "
        "enable_bf16x3_router_gemm:-29 moe_backend linear_backend enable_jit_warmup:27- "
        "sparse_indexer_topk_backend:30- linear_backend_per_quant:30- "
        "enable_rocm_segmented_attn_autotune:32- monokernel:33-",
    ),
    "IrOpPriorityConfig": (
        "kernel_config.ir_op_priority",
        KERNEL,
        "rms_norm fused_add_rms_norm gelu_and_mul_sparse:30-",
    ),
    "EPLBConfig": (
        "parallel_config.eplb_config",
        KERNEL,
        "window_size step_interval num_redundant_experts log_balancedness "
        "log_balancedness_interval use_async policy communicator enable_migration_batching:32-",
    ),
}

# Classes of which no field can change the bytes of KV, whatever vLLM adds to them, and their paths.
WHOLLY_OUTSIDE: dict[str, dict[str, str]] = {
    REPORTS: {
        "KVEventsConfig": "kv_events_config",
        "LoggingConfig": "logging_config",
        "ObservabilityConfig": "observability_config",
        "ProfilerConfig": "profiler_config",
        "WatchdogConfig": "watchdog_config",
    },
    SERVING: {
        "AuxOutputConfig": "aux_output_config",
        "PoolerConfig": "model_config.pooler_config",
        "ReasoningConfig": "reasoning_config",
        "StructuredOutputsConfig": "structured_outputs_config",
        "WatermarkConfig": "watermark_config",
    },
    MEMORY: {
        "EncoderCacheManagerConfig": "ec_manager_config",
        "OffloadConfig": "offload_config",
        "UVAOffloadConfig": "offload_config",
        "PrefetchOffloadConfig": "offload_config",
    },
    PLACEMENT: {
        "DeviceConfig": "device_config",
        "FaultToleranceConfig": "parallel_config.fault_tolerance_config",
    },
    "moves embeddings, as the encoder computes them": {"ECTransferConfig": "ec_transfer_config"},
}
# An engine that has one has a namespace of its own, or the salt that the user gives.
OWN_NAMESPACE = frozenset({"LoRAConfig", "WeightTransferConfig"})
