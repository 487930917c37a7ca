"""The classes of vLLM's configuration, 0.26 to 0.33, with no field in the fingerprint.

By class: its path in VllmConfig, the reason, its fields. "name:28-" is a field that exists from
vLLM 0.28 on, "name:-27" until 0.27.
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
    "AuxOutputConfig": ("aux_output_config", SERVING, "enable_return_routed_experts max_bytes"),
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
    "DeviceConfig": ("device_config", "a daemon has one device", "device device_type"),
    "ReasoningConfig": (
        "reasoning_config",
        SERVING,
        "reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids "
        "_reasoning_end_token_ids _enabled _natural_reasoning_end_token_ids:28-",
    ),
    "EncoderCacheManagerConfig": (
        "ec_manager_config",
        MEMORY,
        "encoder_cache_manager_cls manager_config:28-",
    ),
    "ECTransferConfig": (
        "ec_transfer_config",
        "moves embeddings, as the encoder computes them",
        "ec_connector engine_id ec_buffer_device ec_buffer_size ec_role ec_rank:-31 "
        "ec_parallel_size:-31 ec_ip ec_port ec_connector_extra_config ec_connector_module_path "
        "mm_encoder_output_widths:32-",
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
    "KVEventsConfig": (
        "kv_events_config",
        REPORTS,
        "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm "
        "max_queue_size topic",
    ),
    "LoggingConfig": (
        "logging_config",
        REPORTS,
        "log_level configure_logging pylogging_config_file formatter:32-",
    ),
    "LoRAConfig": (
        "lora_config",
        "an engine with LoRA has a namespace of its own, or the salt that the user gives",
        "max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype target_modules "
        "default_mm_loras enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels:31-",
    ),
    "ObservabilityConfig": (
        "observability_config",
        REPORTS,
        "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics "
        "enable_layerwise_nvtx_tracing enable_mfu_metrics enable_mm_processor_stats "
        "enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose "
        "per_request_spec_decode_metrics:29- custom_histogram_buckets:32-",
    ),
    "OffloadConfig": ("offload_config", MEMORY, "offload_backend uva prefetch"),
    "UVAOffloadConfig": ("offload_config.uva", MEMORY, "cpu_offload_gb cpu_offload_params"),
    "PrefetchOffloadConfig": (
        "offload_config.prefetch",
        MEMORY,
        "offload_group_size offload_num_in_group offload_prefetch_step offload_params",
    ),
    "EPLBConfig": (
        "parallel_config.eplb_config",
        KERNEL,
        "window_size step_interval num_redundant_experts log_balancedness "
        "log_balancedness_interval use_async policy communicator enable_migration_batching:32-",
    ),
    "FaultToleranceConfig": (
        "parallel_config.fault_tolerance_config",
        PLACEMENT,
        "engine_recovery_timeout_sec",
    ),
    "PoolerConfig": (
        "model_config.pooler_config",
        SERVING,
        "task pooling_type seq_pooling_type tok_pooling_type use_activation dimensions "
        "enable_chunked_processing max_embed_len logit_mean logit_sigma step_tag_id "
        "returned_token_ids enable_flash_late_interaction:32-",
    ),
    "ProfilerConfig": (
        "profiler_config",
        REPORTS,
        "profiler torch_profiler_dir torch_profiler_with_stack torch_profiler_with_flops "
        "torch_profiler_use_gzip torch_profiler_dump_cuda_time_total "
        "torch_profiler_record_shapes torch_profiler_with_memory capture_torch_profiler "
        "detailed_trace_annotation ignore_frontend delay_iterations max_iterations "
        "warmup_iterations active_iterations wait_iterations proton_profiler_dir:28- "
        "proton_context:28- proton_data:28- proton_backend:28- proton_mode:28- proton_hook:28- "
        "proton_output_format:28- proton_graph_attribution:30- torch_profiler_activities:31-",
    ),
    "StructuredOutputsConfig": (
        "structured_outputs_config",
        SERVING,
        "backend disable_any_whitespace disable_additional_properties reasoning_parser "
        "reasoning_parser_plugin enable_in_reasoning",
    ),
    "WatchdogConfig": ("watchdog_config", REPORTS, "timeout check_interval dump_dir"),
    "WatermarkConfig": (
        "watermark_config",
        SERVING,
        "key algorithm alpha context_width deduplicate_contexts "
        "deduplicate_contexts_max_history prf allow_target_only_watermarking",
    ),
    "WeightTransferConfig": (
        "weight_transfer_config",
        "an engine that has one has a namespace of its own",
        "backend",
    ),
}
