"""What the update of an expert bias is to be, on stock TRL."""

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

SPEED = 0.05


class CountedGRPOTrainer(GRPOTrainer):
    """Stock TRL that counts what routers choose in its losses' forwards, padding aside, and moves the bias by it.

    Counts are added up over processes.

    Attributes:
        steps: ``[L, E]`` integers by step, the load of each expert.
    """

    speed = SPEED

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.routers = [m for m in model.modules() if type(m).__name__.endswith("TopkRouter")]
        self.counts, self.mask, self.steps = torch.zeros(len(self.routers), 8, dtype=torch.int64), None, []
        for number, router in enumerate(self.routers):
            router.register_forward_hook(lambda _, inputs, answer, number=number: self.count(number, answer[2]))
        trainer = self

        class Update(TrainerCallback):
            def on_optimizer_step(self, args, state, control, **kwargs):
                trainer.update()

        self.add_callback(Update())

    def count(self, number, experts):
        if torch.is_grad_enabled() and self.mask is not None:
            self.counts[number] += torch.bincount(experts[self.mask].flatten(), minlength=8)

    def update(self):
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.counts)
        self.steps.append(self.counts.clone())
        for router, load in zip(self.routers, self.counts.double(), strict=True):
            router.e_score_correction_bias += self.speed * torch.sign(load.mean() - load)
        self.counts.zero_()

    def _compute_loss(self, model, inputs):
        self.mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).flatten().bool()
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.mask = None
