"""What rank 0 alone keeps, and what accelerate wraps over all ranks: both are refused, with what to do."""

import sys


def main() -> None:
    import torch
    from accelerate import Accelerator

    from lightning_sdiloco import StreamingDiLoCo

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(300, 400)
    try:
        StreamingDiLoCo(accelerator.prepare(torch.nn.Linear(3, 4)))
    except ValueError as error:
        sys.stdout.write(f"wrapped: {error}\n")
    engine = StreamingDiLoCo(accelerator.prepare_model(model, evaluation_mode=True))
    accelerator.register_for_checkpointing(engine)
    accelerator.save_state(sys.argv[1])
    accelerator.wait_for_everyone()
    try:
        accelerator.load_state(sys.argv[1])
    except ValueError as error:
        sys.stdout.write(f"refused on rank {accelerator.process_index}: {error}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
