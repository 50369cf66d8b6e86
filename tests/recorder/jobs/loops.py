"""Frameworks that have the training loop themselves; the recorder is stepped from their callbacks, as their documentation has it."""

from __future__ import annotations

import contextlib
import tempfile

import torch
import torch.distributed as dist
from models import WORDS, Gpt, words_loss
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    """Random tokens, the same on all ranks; samplers part them."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, WORDS, (256, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at):
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def recording(folder: str, model, optimizer):
    if not folder:
        return contextlib.nullcontext()
    from tracekit import record

    return record(folder, model=model, optimizer=optimizer, wait=2, warmup=1, active=2)


def told(number: int, loss) -> None:
    print(f"rank {dist.get_rank()} step {number}: {float(loss)!r}")


class WithLoss(nn.Module):
    """As models of transformers are: labels in, the loss among what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def forward(self, input_ids, labels=None):
        logits = self.gpt(input_ids)
        return {"loss": words_loss(logits, labels), "logits": logits}


def hf_trainer(steps: int, folder: str) -> None:
    """transformers' Trainer, two micro-batches a step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, losses, stack = WithLoss(), [], contextlib.ExitStack()

    class Recorded(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.recorder = stack.enter_context(recording(folder, model, optimizer))

        def on_step_end(self, args, state, control, **kwargs):
            told(state.global_step - 1, sum(losses[-2:]))
            if self.recorder is not None:
                self.recorder.step()

        def on_train_end(self, args, state, control, **kwargs):
            stack.close()

    class Own(Trainer):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        Own(model, arguments, train_dataset=Texts(), callbacks=[Recorded()]).train()


def lightning(steps: int, folder: str) -> None:
    """Lightning's Trainer with its DDP strategy."""
    import lightning as library

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = Gpt()

        def training_step(self, batch, number):
            loss = words_loss(self.gpt(batch["input_ids"]), batch["labels"])
            told(number, loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Recorded(library.Callback):
        def on_train_start(self, trainer, module):
            self.stack = contextlib.ExitStack()
            self.recorder = self.stack.enter_context(recording(folder, module, trainer.optimizers))

        def on_train_batch_end(self, trainer, module, *rest):
            if self.recorder is not None:
                self.recorder.step()

        def on_train_end(self, trainer, module):
            self.stack.close()

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = library.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, callbacks=[Recorded()], gradient_clip_val=1.0, **quiet
    )
    trainer.fit(Module(), DataLoader(Texts(), batch_size=4))
