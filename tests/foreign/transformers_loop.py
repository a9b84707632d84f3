"""Trains a small GPT-2 with the Trainer of transformers; resumes from a checkpoint if it is given one."""

import sys
from pathlib import Path


def main() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sys.path.append(str(Path(__file__).parents[2] / "examples" / "accelerate"))
    from transformers_trainer import StreamingDiLoCoCallback

    folder, resume = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=3, n_head=4))
    tokens = torch.randint(0, 300, (256, 1), generator=torch.Generator().manual_seed(1)) + torch.arange(32)
    data = [{"input_ids": row % 300, "labels": row % 300} for row in tokens]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=24,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=8,
        save_steps=8,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:32])
    callback = StreamingDiLoCoCallback(trainer, resume, sync_every=6, overlap_steps=3, fragments="strided:1")
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    torch.save(
        {
            "losses": losses,
            "steps": trainer.state.global_step,
            "report": callback.engine.report(),
            "groups": callback.engine.topology.num_groups,
            "model": model.state_dict(),
            "parameters": sum(p.numel() for p in model.parameters()),
        },
        f"{folder}/rank-{trainer.args.process_index}.pt",
    )


if __name__ == "__main__":
    main()
