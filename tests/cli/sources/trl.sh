accelerate launch grpo.py --model_name_or_path org/model --dataset_name rows.jsonl \
  --num_generations 4 --max_completion_length 256 --per_device_train_batch_size 16 \
  --gradient_accumulation_steps 2 --use_vllm --learning_rate 1e-6 --lr_scheduler_type constant \
  --max_steps 50 --beta 0.01 --epsilon_high 0.28 --bf16 --report_to none --output_dir out
