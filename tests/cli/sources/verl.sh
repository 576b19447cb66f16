set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=rows.jsonl data.val_files=held_out.jsonl data.train_batch_size=64 \
    actor_rollout_ref.model.path=org/model actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_kl_loss=True \
    trainer.logger='["console"]' trainer.n_gpus_per_node=2 $@
