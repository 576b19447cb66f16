"""Configurations of the two other systems, listed key by key: what they were in their first form,
and what verl's is today.
"""

VERL_FIRST = """
data:
  tokenizer: null
  train_files: ~/data/train.parquet
  val_files: ~/data/test.parquet
  prompt_key: prompt
  prompt_id_key: null
  max_prompt_id_length: 64
  max_prompt_length: 512
  max_response_length: 512
  truncation: error
  train_batch_size: 1024
  val_batch_size: 1312
  return_raw_input_ids: False
  return_raw_chat: False
actor_rollout_ref:
  hybrid_engine: True
  model: {path: ~/models/policy, external_lib: null, override_config: {},
      enable_gradient_checkpointing: False}
  actor:
    strategy: fsdp
    ppo_mini_batch_size: 256
    ppo_micro_batch_size: 64
    grad_clip: 1.0
    clip_ratio: 0.2
    entropy_coeff: 0.001
    ppo_epochs: 1
    shuffle: True
    optim: {lr: 1e-6, lr_warmup_steps_ratio: 0., min_lr_ratio: null, warmup_style: constant,
        total_training_steps: -1}
    fsdp_config:
      wrap_policy: {min_num_params: 0}
      param_offload: False
      grad_offload: False
      optimizer_offload: False
  ref:
    fsdp_config: {param_offload: False, wrap_policy: {min_num_params: 0}}
    log_prob_micro_batch_size: 128
  rollout:
    name: vllm
    temperature: 1.0
    top_k: -1
    top_p: 1
    response_length: ${data.max_response_length}
    dtype: bfloat16
    gpu_memory_utilization: 0.5
    ignore_eos: False
    enforce_eager: True
    free_cache_engine: True
    load_format: dummy_dtensor
    tensor_model_parallel_size: 2
    max_num_batched_tokens: 8192
    max_num_seqs: 1024
    log_prob_micro_batch_size: 128
    do_sample: True
critic:
  optim: {lr: 1e-5, lr_warmup_steps_ratio: 0., min_lr_ratio: null, warmup_style: constant,
      total_training_steps: -1}
  model: {path: ~/models/policy, enable_gradient_checkpointing: False}
  ppo_mini_batch_size: ${actor_rollout_ref.actor.ppo_mini_batch_size}
  ppo_micro_batch_size: 64
  grad_clip: 1.0
  cliprange_value: 0.5
reward_model:
  enable: False
  model:
    input_tokenizer: ${actor_rollout_ref.model.path}
    path: ~/models/reward
    external_lib: ${actor_rollout_ref.model.external_lib}
    fsdp_config: {min_num_params: 0, param_offload: False}
  micro_batch_size: 64
  max_length: null
algorithm:
  gamma: 1.0
  lam: 1.0
  adv_estimator: gae
  kl_penalty: kl
  kl_ctrl: {type: fixed, kl_coef: 0.005}
trainer:
  total_epochs: 30
  project_name: verl_examples
  experiment_name: gsm8k
  logger: ['console', 'tracking']
  nnodes: 1
  n_gpus_per_node: 8
  save_freq: -1
  test_freq: 2
  critic_warmup: 0
  default_hdfs_dir: null
  default_local_dir: checkpoints/${trainer.project_name}/${trainer.experiment_name}
"""

VERL_TODAY = """
data: {train_files: [a.parquet, b.parquet], val_files: c.parquet, prompt_key: prompt,
    reward_fn_key: data_source, max_prompt_length: 512, max_response_length: 1024,
    train_batch_size: 128, val_batch_size: null, shuffle: true, filter_overlong_prompts: true,
    truncation: error, image_key: images, custom_cls: {path: null, name: null},
    sampler: {class_path: null}}
actor_rollout_ref:
  nccl_timeout: 600
  hybrid_engine: true
  model: {path: org/name, lora_rank: 0, use_remove_padding: true, trust_remote_code: false,
      enable_gradient_checkpointing: true, override_config: {}}
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    strategy: fsdp2
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 2
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 16384
    clip_ratio: 0.2
    clip_ratio_low: 0.1
    clip_ratio_high: 0.3
    clip_ratio_c: 3.0
    policy_loss: {loss_mode: vanilla, clip_cov_ratio: 0.0002}
    loss_agg_mode: token-mean
    entropy_coeff: 0
    use_kl_loss: true
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    ppo_epochs: 1
    shuffle: false
    checkpoint: {save_contents: [model, optimizer, extra]}
    optim: {lr: 1e-6, lr_warmup_steps_ratio: 0.1, lr_warmup_steps: -1, weight_decay: 0.01,
        warmup_style: cosine, min_lr_ratio: 0.1, num_cycles: 0.5, total_training_steps: -1}
    grad_clip: 1.0
    ulysses_sequence_parallel_size: 1
    fsdp_config: {wrap_policy: {min_num_params: 0}, param_offload: false, optimizer_offload: true,
        fsdp_size: -1}
  ref: {strategy: fsdp2, log_prob_micro_batch_size_per_gpu: 4}
  rollout:
    name: vllm
    mode: async
    n: 8
    temperature: 1.0
    top_k: -1
    top_p: 1
    val_kwargs: {top_k: -1, top_p: 1.0, temperature: 0, n: 1, do_sample: false}
    engine_kwargs: {vllm: {}, sglang: {}}
    multi_turn: {enable: false, format: hermes}
    tensor_model_parallel_size: 1
    max_num_batched_tokens: 8192
    max_num_seqs: 256
    load_format: dummy
    dtype: bfloat16
critic: {strategy: fsdp2, enable: null, cliprange_value: 0.5, grad_clip: 1.0,
    loss_agg_mode: token-mean, ppo_epochs: 1, shuffle: false, ppo_mini_batch_size: 64,
    forward_max_token_len_per_gpu: 32768, optim: {lr: 1e-5, warmup_style: constant,
    weight_decay: 0.01}, model: {path: org/name, lora_rank: 0, fsdp_config: {param_offload: false,
    fsdp_size: -1}}}
reward_model: {enable: false, reward_manager: naive, sandbox_fusion: {url: null}}
custom_reward_function: {path: null, name: compute_score}
algorithm: {gamma: 1.0, lam: 1.0, adv_estimator: grpo, norm_adv_by_std_in_grpo: true,
    use_kl_in_reward: false, kl_penalty: kl, kl_ctrl: {type: fixed, kl_coef: 0.001, horizon: 10000,
    target_kl: 0.1}, use_pf_ppo: false, pf_ppo: {weight_pow: 2.0}}
trainer: {balance_batch: true, total_epochs: 30, total_training_steps: 200, project_name: p,
    experiment_name: e, logger: [console, wandb], nnodes: 1, n_gpus_per_node: 8, save_freq: 20,
    test_freq: 5, critic_warmup: 0, default_local_dir: ckpt, val_before_train: true,
    resume_mode: auto, max_actor_ckpt_to_keep: 3, device: cuda}
global_profiler: {tool: null}
ray_kwargs: {ray_init: {num_cpus: null}}
"""

AREAL = """
experiment_name: code
trial_name: first
seed: 1
n_nodes: 1
n_gpus_per_node: 8
allocation_mode: manual
exp_ctrl: {total_train_epochs: 1, save_freq_steps: 20, save_freq_secs: null, save_freq_epochs: null}
actor:
  type: {_class: qwen2}
  path: /models/policy
  gradient_checkpointing: true
  bf16: true
  vllm: {max_seq_len_to_capture: 4096, max_num_seqs: 256, gpu_memory_utilization: 0.9}
  optimizer: {lr: 2e-5, lr_scheduler_type: constant, eps: 1e-5, beta1: 0.9, beta2: 0.98,
      weight_decay: 0.05, warmup_steps_proportion: 0.0}
critic: {path: /models/policy, init_critic_from_actor: true, optimizer: {lr: 5e-6, beta2: 0.99}}
ref: {path: /models/policy}
rew: {path: /models/policy}
actor_gen: {mb_spec: {max_tokens_per_mb: 30720}}
actor_train: {mb_spec: {max_tokens_per_mb: 20480}, parallel: {data_parallel_size: 4}}
critic_train: {}
critic_inf: {}
rew_inf: {}
ref_inf: {}
dataset: {path: /data/code.jsonl, max_prompt_len: 1024, train_bs_n_seqs: 64,
    fill_to_max_length: false}
ppo:
  gen: {n: 1, max_new_tokens: 2048, min_new_tokens: 0, greedy: false, top_p: 1.0, top_k: 100000000,
      temperature: 1.0}
  ppo_n_minibatches: 4
  kl_ctl: 0.1
  discount: 1.0
  gae_lambda: 1.0
  eps_clip: 0.2
  value_eps_clip: 0.2
  disable_value: false
  max_reward_clip: 20.0
  reward_output_scaling: 1.0
  reward_output_bias: 0.0
  early_stop_imp_ratio: 5.0
  use_adaptive_kl_ctl: false
  adv_norm: true
  value_norm: true
  value_norm_type: exp
  value_norm_beta: 0.99995
  value_norm_eps: 1e-5
group_size: 8
generation_size: null
mask_no_eos_with_zero: false
rm_output_scaling: null
ref_ema_eta: null
group_adv_norm: false
mask_too_long: false
rw_type: sparse
task: code
check_xml_format: false
use_dense_reward: false
reward_delta: true
check_verifier_status: false
dataset_filter_threshold: 100.0
dataset_max_filter_percentage: 0.0
REAL_CODE_METADATA_PATH: /data/metadata.jsonl
FUNCTIONCALL_SERVICE_DOMAIN: http://localhost:8080
"""
