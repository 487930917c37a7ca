"""Each field of vLLM's configuration, 0.26 to 0.33: whether it is in the fingerprint, and why not.

inside: fields that change the fingerprint, each with a value that must do so. through: fields that
the fingerprint contains as part of another value. outside: fields that must not change it, and why.
"name:28-" is a field that exists from vLLM 0.28 on, "name:-27" until 0.27.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from support.vllm_fields_outside import (
    DERIVED,
    KERNEL,
    LOADING,
    MEMORY,
    OUTSIDE,
    PLACEMENT,
    REFUSED,
    SCHEDULING,
    SERVING,
)


@dataclass(frozen=True)
class Fields:
    """Fields of one object of vLLM's configuration.

    path: of the object in VllmConfig; "" is VllmConfig itself, None if it is not part of it.
    """

    path: str | None
    inside: dict[str, Any]
    through: dict[str, str]
    outside: dict[str, str]


FIELDS: dict[str, Fields] = {
    name: Fields(path, {}, {}, {reason: names}) for name, (path, reason, names) in OUTSIDE.items()
}
FIELDS |= {
    "VllmConfig": Fields(
        "",
        inside={
            "additional_config": {"kv_format": "other"},
            "lora_config": SimpleNamespace(),
            "weight_transfer_config": SimpleNamespace(),
        },
        through={
            "its own fields": "model_config cache_config parallel_config scheduler_config "
            "device_config load_config offload_config attention_config mamba_config "
            "kernel_config speculative_config diffusion_config structured_outputs_config "
            "observability_config compilation_config profiler_config kv_transfer_config "
            "kv_events_config ec_transfer_config reasoning_config ec_manager_config:27- "
            "engram_config:30- watermark_config:30- aux_output_config:31- logging_config:31- "
            "watchdog_config:33-",
            "the salt, for what the fingerprint cannot identify": "instance_id",
        },
        outside={
            DERIVED + ": model_config.quantization, and the checkpoint": "quant_config",
            KERNEL: "optimization_level performance_mode",
            PLACEMENT: "shutdown_timeout",
        },
    ),
    "AttentionConfig": Fields(
        "attention_config",
        inside={
            "backend": "FLASHINFER",
            "backend_per_kind": {"mla_attention": "TRITON_MLA"},
            "use_trtllm_attention": True,
            "indexer_kv_dtype": "fp8",
            "use_fp4_indexer_cache:-29": True,
            "use_non_causal": True,
            "disable_flashinfer_q_quantization": True,
            "use_prefill_query_quantization": True,
        },
        through={},
        outside={
            KERNEL: "flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
            "tq_max_kv_splits_for_cuda_graph mla_prefill_backend sparse_mla_force_mqa "
            "flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size "
            "minimax_m3_msa_decode_backend:27- indexer_sparse_logits:31- "
            "tokenspeed_mla_min_split_kv:32- trtllm_ragged_backend:33- "
            "indexer_tp_shard_min_rows:33- minimax_m3_indexer_cp:33-",
            MEMORY: "sparse_mla_prefill_workspace_factor:32-",
            "ROCm only": "use_prefill_decode_attention:-28",
            REFUSED: "hisparse_config:30-",
        },
    ),
    "CacheConfig": Fields(
        "cache_config",
        inside={
            "cache_dtype": "int8_per_token_head",
            "prefix_caching_hash_algo": "xxhash",
            "calculate_kv_scales:-27": True,
            "kv_cache_dtype_skip_layers": ["1"],
            "kv_cache_layout:29-": "BLHNC",
            "mamba_cache_dtype": "float16",
            "mamba_ssm_cache_dtype": "float16",
            "mamba_cache_mode": "align",
            "use_replayssm:27-": False,
            "replayssm_buffer_len:27-": 32,
            "use_kda_recoverssm:29-": True,
        },
        through={
            "tokens per block and per hash": "block_size prefix_match_unit mamba_block_size "
            "hash_block_size:32-",
            "bytes of a block": "mamba_page_size_padded skip_page_size_padded",
            "the groups that are offloaded": "swa_bounded_replay:31-",
            "the model's configuration, and pages": "sliding_window",
        },
        outside={
            MEMORY: "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks:33-",
            SCHEDULING: "enable_prefix_caching prefix_cache_retention_interval:29- "
            "enable_mamba_fine_grained_prefix_cache:30-30 "
            "enable_mamba_shared_prefix_checkpoint:31- cache_hit_alignment_tokens:32-",
            DERIVED: "is_attention_free user_specified_block_size "
            "user_specified_mamba_block_size:-31 _block_size_resolved "
            "effective_attention_block_size:31-",
            "layers that skip tokens have no KV of their own": "kv_sharing_fast_prefill",
        },
    ),
    "KVTransferConfig": Fields(
        "kv_transfer_config",
        inside={},
        through={
            "blocks per chunk, the salt": "kv_connector_extra_config",
            "the hash seed, if it is random; else outside": "engine_id",
        },
        outside={
            PLACEMENT: "kv_connector kv_connector_module_path kv_buffer_device "
            "kv_buffer_size:-31 kv_role kv_rank:-31 kv_parallel_size:-31 kv_ip:-31 kv_port",
            "what is received has the engine's own layout": "enable_permute_local_kv",
            SCHEDULING: "kv_load_failure_policy",
        },
    ),
    "LoadConfig": Fields(
        "load_config",
        inside={"load_format": "dummy", "ignore_patterns": ["*.pt"]},
        through={},
        outside={
            LOADING: "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size model_loader_extra_config device use_tqdm_on_load "
            "pt_load_map_location",
        },
    ),
    "MambaConfig": Fields(
        "mamba_config",
        inside={
            "backend": "flashinfer",  # with ReplaySSM, a page has more rows
            "enable_stochastic_rounding": True,
            "stochastic_rounding_philox_rounds": 7,
        },
        through={},
        outside={KERNEL: "ssu_algorithm:27-"},
    ),
    "ModelConfig": Fields(
        "model_config",
        inside={
            "model": "another",
            "model_weights": "s3://bucket/another",
            "dtype": "float16",
            "hf_config_path": "another",
            "revision": "another",
            "code_revision": "another",
            "max_model_len": 8192,  # with longrope
            "quantization": "fp8",
            "quantization_config": {"linear": "fp8_per_token"},
            "config_format": "mistral",
            "hf_overrides": {"rope_theta": 1},
            "model_class_overrides": {"Llama": "module:Llama"},
            "model_impl": "transformers",
            "override_attention_dtype:-27": "float32",
            "enable_sleep_mode": True,
        },
        through={
            "the commit or the files; a model may write into these": "hf_config hf_text_config",
            "its own fields": "multimodal_config pooler_config",
        },
        outside={
            "the same layers with another head": "runner convert is_submodel_config:31- "
            "word_embeddings_untied_by_checkpoint:29-",
            SERVING: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init seed "
            "allowed_local_media_path allowed_media_domains max_logprobs logprobs_mode "
            "use_fp64_gumbel enable_prompt_embeds served_model_name generation_config "
            "override_generation_config logits_processors io_processor_plugin "
            "renderer_num_workers enable_return_routed_experts:-30 return_sampling_mask:28- "
            "enable_trace_replay:29-",
            LOADING: "trust_remote_code hf_token allow_deprecated_quantization",
            KERNEL: "enforce_eager disable_cascade_attn",
            MEMORY: "sleep_mode_backend enable_cumem_allocator "
            "enable_nccl_comm_suspend:30- sleep_preserve_parameter_names:31- "
            "sleep_mode_offload_cudagraph:32-",
            "prompts are not longer than the window then": "disable_sliding_window",
            "the length of a draft": "spec_target_max_model_len",
        },
    ),
    "MultiModalConfig": Fields(
        "model_config.multimodal_config",
        inside={
            "media_io_kwargs": {"video": {"num_frames": 8}},
            "mm_processor_kwargs": {"max_pixels": 50176},
            "mm_device_do_normalize:28-": True,
            "mm_encoder_attn_dtype": "fp8",
            "mm_encoder_fp8_scale_path": __file__,
            "video_pruning_rate": 0.75,
            "video_pruning_method:27-": "vidcom2",
        },
        through={},
        outside={
            "another algorithm has other block hashes": "mm_hasher_algorithm:27-",
            SERVING: "language_model_only limit_per_prompt enable_mm_embeds "
            "allow_missing_mm_embeddings:28- interleave_mm_strings mm_encoder_only",
            MEMORY: "mm_processor_cache_gb mm_processor_cache_type "
            "mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc "
            "mm_ipc_gpu_memory_gb",
            KERNEL: "mm_encoder_tp_mode mm_encoder_attn_backend",
            "written, for a later start": "mm_encoder_fp8_scale_save_path "
            "mm_encoder_fp8_scale_save_margin",
        },
    ),
    "ParallelConfig": Fields(
        "parallel_config",
        inside={
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": 2,
            "prefill_context_parallel_size": 2,
            "decode_context_parallel_size": 4,
            "dcp_kv_cache_interleave_size": 16,
            "cp_kv_cache_interleave_size": 16,
            "rank": 1,
            "world_size": 2,
        },
        through={},
        outside={
            PLACEMENT: "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_index data_parallel_master_ip "
            "data_parallel_rpc_port data_parallel_master_port data_parallel_backend "
            "data_parallel_external_lb data_parallel_hybrid_lb ray_workers_use_nsight "
            "ray_runtime_env placement_group distributed_executor_backend worker_cls "
            "sd_worker_cls:-31 worker_extension_cls master_addr master_port node_rank nnodes "
            "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds "
            "_data_parallel_master_port_list _coord_store_port _api_process_count "
            "_api_process_rank enable_fault_tolerance:27- fault_tolerance_config:27- "
            "elastic_ep_max_dp_size:30- enable_elastic_ep enable_shm_tensor_arena:32-",
            KERNEL: "enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
            "expert_placement_strategy all2all_backend disable_custom_all_reduce enable_dbo "
            "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
            "disable_nccl_for_dp_synchronization dcp_comm_backend dcp_q_replicate:29- "
            "enable_batch_sharded_sampling:29- dp_sync_interval:30- enable_hc_sp:32-",
            LOADING: "max_parallel_loading_workers",
            DERIVED: "is_moe_model",
            "only allows NIXL to change the interleave size": ""
            "_allow_auto_resolve_cp_interleave_size:30-",
        },
    ),
    "QuantizationConfigArgs": Fields(
        None, {}, {"ModelConfig.quantization_config": "linear moe ignore targets:30-"}, {}
    ),
    "QuantSpec": Fields(None, {}, {"ModelConfig.quantization_config": "weight activation"}, {}),
    "DiffusionConfig": Fields(
        "diffusion_config",
        inside={"canvas_length": 64, "max_denoising_steps": 4},
        through={},
        outside={},
    ),
    "SchedulerConfig": Fields(
        "scheduler_config",
        inside={},
        through={"groups, and tokens per block": "disable_hybrid_kv_cache_manager"},
        outside={
            SCHEDULING: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
            "max_num_partial_prefills:-26 max_long_partial_prefills:-26 "
            "long_prefill_token_threshold enable_chunked_prefill policy "
            "disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl watermark "
            "prefill_schedule_interval async_scheduling max_num_queued_reqs:29- "
            "max_num_queued_tokens:29- max_num_active_seqs:31- "
            "long_prefill_token_threshold_adaptive:31-",
            MEMORY: "max_num_encoder_input_tokens encoder_cache_size",
            SERVING: "stream_interval",
            DERIVED: "runner_type is_multimodal_model",
        },
    ),
    "SpeculativeConfig": Fields(
        "speculative_config",
        inside={
            "method": "mtp",
            "quantization": "fp8",
            "draft_tensor_parallel_size": 1,
            "kv_cache_dtype": "fp8",
            "attention_backend": "FLASHINFER",
            "code_revision": "another",
            "parallel_drafting": True,
            "index_share_for_mtp_iteration:29-": True,
            "use_heterogeneous_vocab": True,
            "draft_model_config": SimpleNamespace(model="another"),
            "draft_load_config": SimpleNamespace(load_format="dummy"),
            "num_speculative_tokens": 5,  # with ReplaySSM
        },
        through={
            "draft_model_config": "model revision max_model_len",
            "draft_tensor_parallel_size": "tensor_parallel_size draft_parallel_config",
            "the engine's own": "target_model_config target_parallel_config",
        },
        outside={
            KERNEL: "enforce_eager moe_backend disable_padded_drafter_batch "
            "use_local_argmax_reduction draft_lm_head_quantization:33-",
            "no layers with KV": "prompt_lookup_max prompt_lookup_min "
            "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
            "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob",
            SERVING: "num_speculative_tokens_per_batch_size rejection_sample_method "
            "synthetic_acceptance_rates synthetic_acceptance_length draft_sample_method "
            "enable_adaptive_verification:28- dspark_draft_topk:28- xpress_topc:33- "
            "fly_window_size:33- fly_entropy_threshold:33- fly_entropy_top_k:33-",
            SCHEDULING: "disable_eagle_block_drop:30-",
            "without lookahead the block hashes differ": "disable_lookahead_block_hashes:33-",
        },
    ),
}
# Dataclasses of vllm.config that no field of VllmConfig has, or only a part of one above.
ELSEWHERE = frozenset(
    {
        "AudioDummyOptions",
        "BaseDummyOptions",
        "ImageDummyOptions",
        "ModelArchitectureConfig",
        "Range",
        "SpeechToTextConfig",
        "SpeechToTextParams",
        "VideoDummyOptions",
    }
)

# Fields of the dataclasses of vllm.v1.kv_cache_interface that are not in fingerprint.SPEC_FIELDS.
PAGE_FIELDS: dict[str, str] = {
    "the offloaded groups, their number, and layers": "kv_cache_groups layer_names kv_cache_spec "
    "kv_cache_specs enable_kv_transfer is_eagle_group",
    "bytes of a block": "page_size_padded alignment block_stride_alignment num_blocks size",
    "where pages are in a block, if it holds those of all layers": "kv_cache_tensors shared_by "
    "layers layer_stride block_stride offset",
    "the layout": "kv_cache_layout",
    "tokens per hash": "hash_block_size",
    SCHEDULING: "prefix_cache_retention_interval cache_hit_alignment_tokens bounded_replay "
    "num_speculative_blocks num_prefill_checkpoint_blocks prefill_checkpoint_alignment "
    "extra_retained_tokens",
    REFUSED: "hisparse_host_num_blocks hisparse_host_block_stride hisparse_shared_host_pool "
    "host_resident role page_size blocks_per_request",
    KERNEL: "topk_buffer_width is_index_group_leader non_causal_multi_token_decode num_heads",
    "which ranks have the same bytes": "kv_tp_replicas max_tp_shards is_draft",
}
