#!/bin/bash
MODEL=/models/policy
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 \
   --vllm.num_engines 2 --vllm.tensor_parallel_size 2 \
   --actor.model_name_or_path $MODEL \
   --algo.advantage.estimator group_norm \
   --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.batch_size 256 \
   --actor.adam.lr 5e-7 --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --algo.advantage.is_correction_level token \
   --data.prompt_dataset rows.jsonl --data.input_key prompt \
   --rollout.max_new_tokens 512 --train.async_enable --ds.zero_stage 3
