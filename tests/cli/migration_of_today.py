"""Small configurations of our own with the keys that other trainers use today."""

AREAL_NOW = """
experiment_name: sums
trial_name: t0
seed: 3
total_train_epochs: 2
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: out, name_resolve: {type: nfs}}
scheduler: {type: null}
rollout: {backend: "sglang:d2p1t2", max_concurrent_rollouts: 64, queue_size: null,
    consumer_batch_size: "${train_dataset.batch_size}", max_head_offpolicyness: 3}
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 512, greedy: false, temperature: 0.8}
actor:
  backend: "fsdp:d4p1t1"
  path: org/model
  init_from_scratch: false
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 8192}
  optimizer: {type: adam, lr: 2.0e-6, weight_decay: 0.02, beta1: 0.9, beta2: 0.98, eps: 1.0e-8,
      lr_scheduler_type: constant, gradient_clipping: 0.5, warmup_steps_proportion: 0.0}
  eps_clip: 0.3
  reward_scaling: 2.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  scheduling_spec: [{gpu: 1}]
ref: {path: "${actor.path}", dtype: "${actor.dtype}", optimizer: null}
sglang: {model_path: "${actor.path}", mem_fraction_static: 0.8}
vllm: {model: "${actor.path}", max_model_len: 4096, gpu_memory_utilization: 0.7}
train_dataset: {path: rows.jsonl, batch_size: 64, shuffle: true, type: rl, max_length: 256}
valid_dataset: {path: held_out.jsonl, batch_size: 64, type: rl}
saver: {freq_epochs: null, freq_steps: 20, freq_secs: 600}
recover: {mode: disabled, freq_secs: 600}
evaluator: {freq_epochs: null, freq_steps: 5, freq_secs: null}
stats_logger: {wandb: {mode: disabled}}
perf_tracer: {enabled: false}
"""

PRIME_RL = """
max_steps = 40
seq_len = 2048
[deployment]
num_train_gpus = 2
num_infer_gpus = 4
[model]
name = "org/model"
[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 4
[orchestrator.train.sampling]
max_completion_tokens = 512
temperature = 0.9
[[orchestrator.train.source]]
name = "words"
[orchestrator.eval]
interval = 10
[trainer.optim]
lr = 3e-6
max_norm = 0.5
[trainer.scheduler]
type = "cosine"
warmup_steps = 7
min_lr = 3e-7
[ckpt]
interval = 20
[inference.vllm]
tensor_parallel_size = 2
"""

OPENRLHF = """#!/bin/bash
MODEL=/models/policy
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 \\
   --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \\
   --actor.model_name_or_path $MODEL \\
   --algo.advantage.estimator group_norm \\
   --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.batch_size 256 \\
   --actor.adam.lr 5e-7 --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \\
   --actor.eps_clip_low_high 0.2 0.27 \\
   --algo.advantage.is_correction_level token \\
   --data.prompt_dataset rows.jsonl --data.input_key prompt \\
   --rollout.max_new_tokens 512 --train.async_enable --ds.zero_stage 3
"""

TRL_ARGUMENTS = """
accelerate launch grpo.py --model_name_or_path org/model --dataset_name rows.jsonl \\
  --num_generations 4 --max_completion_length 256 --per_device_train_batch_size 16 \\
  --gradient_accumulation_steps 2 --use_vllm --learning_rate 1e-6 --lr_scheduler_type constant \\
  --max_steps 50 --beta 0.01 --epsilon_high 0.28 --bf16 --report_to none --output_dir out
"""

VERL_SCRIPT = """
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=rows.jsonl data.val_files=held_out.jsonl data.train_batch_size=64 \\
    actor_rollout_ref.model.path=org/model actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_kl_loss=True \\
    trainer.logger='["console"]' trainer.n_gpus_per_node=2 $@
"""
