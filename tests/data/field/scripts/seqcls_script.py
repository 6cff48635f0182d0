from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

model = AutoModelForSequenceClassification.from_pretrained("meta-llama/Llama-3.2-1B", num_labels=5)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS"))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=8, bf16=True, num_train_epochs=3)
trainer = Trainer(model=model, args=args, train_dataset=None)
trainer.train()
