"""The fields of SGLang's ServerArgs, 0.5.23, that are not in the fingerprint, and why.

Those that are in it: FIELDS, PATHS and UNVERSIONED_FIELDS of kvferry.client.sglang.fingerprint, and
BY_NAME here, which it reads by their names.
"""

from __future__ import annotations

KERNEL = "another kernel, schedule or collective for the same function at the same precision"
EXPERTS = "where experts are, and which copy of one computes"
RANKS = "the ranks that divide KV are counted from their process group; others change no KV"
MEMORY = "how much memory is used and for what, not what is in it"
SCHEDULING = "which requests and tokens are computed when, and which KV the GPU keeps"
SERVING = "requests, tokens, sampling and outputs; the tokens are in the page hashes"
MEDIA = "how media are read, moved and cached; their hashes are in the page hashes"
DRAFTING = "how many tokens are drafted and accepted; rejected ones have no page"
LORA = "a server with LoRA has a namespace of its own, or the salt that the user gives"
REPORTS = "logs, metrics, traces, dumps and checks"
PLACEMENT = "processes, devices, addresses and ports"
LOADING = "how weights are read, not which"
OTHER_TIERS = "where KV goes besides, not what it is"
REFUSED = "kvferry refuses it: see supported.py"

BY_NAME = frozenset(
    {
        "model_path",
        "revision",
        "dtype",
        "kv_cache_dtype",
        "speculative_draft_model_path",
        "enable_lora",
        "lora_paths",
    }
)

OUTSIDE: dict[str, str] = {
    KERNEL: "enable_lean_attention sampling_backend fp8_gemm_runner_backend bf16_gemm_backend "
    "dsa_paged_mqa_logits_backend dsa_topk_backend dsa_triton_union enable_dsa_fused_indexer "
    "disable_flashinfer_autotune flashinfer_autotune_skip_ops mamba_backend "
    "linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
    "linear_attn_verify_backend cuda_graph_config cuda_graph_backend_decode "
    "cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "
    "cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
    "cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph disable_decode_cuda_graph "
    "disable_cuda_graph disable_cuda_graph_padding enable_cudagraph_gc enable_nccl_nvls "
    "enable_symm_mem triton_attention_num_kv_splits triton_attention_split_tile_size "
    "flashinfer_mla_disable_ragged enable_fused_qk_norm_rope enable_fused_moe_sum_all_reduce "
    "disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem enable_scattered_sconv "
    "pre_warm_nccl boundary_reduction speculative_boundary_reduction "
    "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
    "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion "
    "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode "
    "enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs "
    "disable_chunked_prefix_cache dcp_comm_backend dcp_replicate_q_proj "
    "enable_deterministic_inference enable_nvidia_megakernel enable_amd_monokernel "
    "enable_two_batch_overlap enable_single_batch_overlap tbo_token_distribution_threshold "
    "speculative_attention_mode speculative_dsa_topk_backend kt_cpuinfer kt_threadpool_count "
    "enable_layernorm_sp enable_megamoe_for_layernorm_sp enable_attn_tp_input_scattered "
    "disable_attn_tp_gather enable_p2p_check",
    EXPERTS: "ep_size deepep_v2_mode deepep_mode fuseep_mode deepep_config "
    "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb "
    "eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk "
    "eplb_min_rebalancing_utilization_threshold elastic_ep_backend "
    "enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode "
    "ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout "
    "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion "
    "enforce_shared_experts_fusion enable_paged_experts paged_experts_num_resident",
    RANKS: "tp_size dp_size attn_dp_size moe_dp_size dwdp_size moe_dense_tp_size "
    "enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head "
    "enable_tp_lm_head_all_to_all enable_shared_experts_attn_tp shared_experts_tp_size "
    "enable_dense_mlp_attn_tp enable_cp_tp_group_sharing",
    "the pages are in the fingerprint": "page_size disable_hybrid_swa_memory",
    "pools of an NPU, which kvferry refuses": "c128_page_size",
    MEMORY: "mem_fraction_static max_total_tokens swa_full_tokens_ratio "
    "_swa_full_tokens_ratio_explicitly_set max_mamba_cache_size mamba_full_memory_ratio "
    "int8_mamba_ckpt_size cpu_offload_gb offload_group_size offload_num_in_group "
    "offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend "
    "ple_offload_dir enable_weights_cpu_backup enable_draft_weights_cpu_backup",
    SCHEDULING: "max_running_requests max_queued_requests chunked_prefill_size "
    "prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking "
    "max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling "
    "disable_priority_preemption default_priority_value abort_on_priority_when_disabled "
    "schedule_low_priority_values_first priority_scheduling_preemption_threshold "
    "retraction_policy schedule_conservativeness radix_eviction_policy "
    "radix_eviction_policy_config _radix_eviction_policy_explicitly_set "
    "prefill_only_disable_kv_cache disable_radix_cache radix_cache_backend "
    "disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval "
    "enable_mixed_chunk pp_max_micro_batch_size pp_async_batch_depth load_balance_method "
    "enable_streaming_session enable_session_radix_cache strip_thinking_cache "
    "mamba_max_states_per_path uses_mamba_radix_cache dllm_fdfo enable_pdmux "
    "pdmux_config_path sm_group_num enable_prefill_delayer prefill_delayer_max_delay_passes "
    "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
    "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
    "prefill_delayer_max_delay_ms min_free_slots_delay",
    SERVING: "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num "
    "detokenizer_worker_num skip_tokenizer_init is_embedding random_seed mlx_enable_sampling "
    "served_model_name weight_version chat_template trust_request_chat_template "
    "hf_chat_template_name completion_template file_storage_path enable_cache_report "
    "return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs "
    "enable_strict_thinking tool_call_parser tool_server sampling_defaults "
    "asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params "
    "allow_auto_truncate stream_interval batch_notify_size "
    "stream_response_default_include_usage incremental_streaming_output "
    "constrained_json_whitespace_pattern constrained_json_disable_any_whitespace "
    "constrained_json_max_whitespace_cnt grammar_backend disable_outlines_disk_cache "
    "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size "
    "dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode "
    "disable_tokenizer_batch_decode enable_custom_logit_processor enable_return_hidden_states "
    "return_hidden_states_mode enable_return_routed_experts enable_return_indexer_topk "
    "enable_return_aux_hidden_states aux_hidden_state_capture "
    "return_aux_hidden_state_layer_ids sampling_mask_max_tokens enable_response_store "
    "enable_watermark watermark_config watermark_key watermark_key_b "
    "watermark_context_window watermark_mixing_probability watermark_max_probability "
    "watermark_default_enabled watermark_enforce_all",
    "it disables the tree": "enable_mis",
    MEDIA: "enable_multimodal enable_broadcast_mm_inputs_process enable_prefix_mm_cache "
    "mm_enable_dp_encoder mm_processor_worker_num mm_io_worker_num allowed_media_domains "
    "media_url_max_file_size_mb mm_preprocess_cache_size_mb trust_mm_content_hashes "
    "limit_mm_data_per_request enable_mm_global_cache mm_global_cache_backend "
    "mm_feature_transport encoder_only language_only language_model_only "
    "encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls "
    "enable_adaptive_dispatch_to_encoder",
    DRAFTING: "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
    "speculative_dflash_block_size speculative_dspark_block_size "
    "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
    "speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single "
    "speculative_accept_threshold_acc speculative_use_rejection_sampling "
    "speculative_use_block_verification speculative_domino_candidate_pool_size "
    "speculative_adaptive speculative_adaptive_config decoupled_spec_bind_endpoint "
    "decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role spec_trace_dir "
    "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
    "speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity "
    "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
    "speculative_ngram_external_corpus_max_tokens",
    "follows from speculative_draft_model_quantization": (
        "_speculative_draft_quantization_explicitly_set"
    ),
    LORA: "enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras "
    "max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size "
    "experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
    "lora_drain_wait_threshold",
    REPORTS: "log_level log_level_http log_requests log_requests_level log_requests_format "
    "log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost "
    "enable_metrics smg_http_sidecar_port enable_mfu_metrics "
    "enable_metrics_for_all_schedulers load_snapshot_publish_interval "
    "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels "
    "extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency "
    "bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets "
    "gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging "
    "kv_events_config load_publish_endpoint enable_forward_pass_metrics "
    "forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules "
    "otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir "
    "stat_loggers enable_profile_cuda_graph debug_cuda_graph enable_layerwise_nvtx_marker "
    "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size "
    "expert_balancedness_report_mode kv_canary kv_canary_real_data kv_canary_sweep_interval "
    "debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file "
    "msprobe_dump_config model_checksum",
    PLACEMENT: "nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank device "
    "base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray "
    "custom_sigquit_handler numa_node gc_threshold host port fastapi_root_path smg_grpc_mode "
    "grpc_mode grpc_port grpc_worker_threads grpc_response_timeout_secs sidecar sidecar_args "
    "skip_server_warmup warmups enable_http2 http2_max_concurrent_streams "
    "http2_initial_connection_window_size enable_http_worker_reuseport ssl_keyfile "
    "ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key "
    "engine_info_bootstrap_port",
    LOADING: "trust_remote_code startup_weight_load_mode weight_loader_disable_mmap "
    "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
    "weight_loader_drop_cache_after_load remote_instance_weight_loader_seed_instance_ip "
    "remote_instance_weight_loader_seed_instance_service_port "
    "remote_instance_weight_loader_send_weights_group_ports "
    "remote_instance_weight_loader_backend "
    "remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config "
    "download_dir delete_ckpt_after_loading weight_cache_mode weight_cache_socket "
    "weight_cache_timeout",
    "written, for a later start": "modelopt_checkpoint_save_path modelopt_export_path",
    OTHER_TIERS: "enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size "
    "hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_mem_layout "
    "hicache_storage_backend hicache_storage_prefetch_policy "
    "hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval "
    "hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker "
    "unified_cache_external_linker_backend unified_cache_external_linker_config "
    "enable_linker_mla_dedup enable_lmcache lmcache_config_file enable_flexkv "
    "flexkv_config_file disaggregation_mode disaggregation_transfer_backend "
    "disaggregation_bootstrap_port disaggregation_ib_device "
    "disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache "
    "disaggregation_decode_retraction_backup num_reserved_decode_tokens "
    "disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
    "disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy "
    "disaggregation_enable_kv_checksum enable_pd_role_switch optimistic_prefill_attempts",
    REFUSED: "enable_memory_saver enable_unified_memory enable_hisparse hisparse_config",
}
