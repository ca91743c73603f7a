"""Training draft checkpoints for a target: texts, the target's states on them, and the loop. What is learnt is the
drafter's (:class:`jackfield.interfaces.DraftTrainer`).
"""

from jackfield.training.loop import TrainingStep
from jackfield.training.measure import Measured
from jackfield.training.settings import TrainingSettings
from jackfield.training.train import TrainingResult, train_drafter, trainable_drafter

__all__ = [
    "Measured",
    "TrainingResult",
    "TrainingSettings",
    "TrainingStep",
    "train_drafter",
    "trainable_drafter",
]
