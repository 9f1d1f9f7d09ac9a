"""What the frames of a training framework mean: one table from (framework, function) to a word for people.

A function is written as the interpreter names it, with its class where the bare name would say too little.
"""

from __future__ import annotations

__all__ = ["CHECKPOINT", "EVALUATION", "FRAMEWORKS", "framework_of", "word_of"]

FRAMEWORKS = {
    "transformers": "transformers",
    "trl": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "lightning",
    "deepspeed": "deepspeed",
    "ray": "ray",
}
"""Top-level packages, and under which name the table below has them."""
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")

CALLBACK = "a callback"
CHECKPOINT = "a checkpoint"
CLIPPING = "gradient clipping"
EVALUATION = "evaluation"
LOGGING = "logging"
METRICS = "metrics"
GENERATION = "generation"

WORDS = {
    ("transformers", "call_event"): CALLBACK,
    ("transformers", "_clip_grad_norm"): CLIPPING,
    ("transformers", "_get_grad_norm"): CLIPPING,
    ("transformers", "_evaluate"): EVALUATION,
    ("transformers", "evaluate"): EVALUATION,
    ("transformers", "evaluation_loop"): EVALUATION,
    ("transformers", "prediction_loop"): EVALUATION,
    ("transformers", "predict"): EVALUATION,
    ("transformers", "compute_metrics"): METRICS,
    ("transformers", "nested_gather"): METRICS,
    ("transformers", "_save_checkpoint"): CHECKPOINT,
    ("transformers", "save_model"): CHECKPOINT,
    ("transformers", "save_pretrained"): CHECKPOINT,
    ("transformers", "_load_best_model"): CHECKPOINT,
    ("transformers", "Trainer.log"): LOGGING,
    ("transformers", "_maybe_log_save_evaluate"): "logging, saving and evaluation",
    ("transformers", "_generate_and_score_completions"): GENERATION,
    ("transformers", "generate"): GENERATION,
    ("accelerate", "clip_grad_norm_"): CLIPPING,
    ("accelerate", "clip_grad_value_"): CLIPPING,
    ("accelerate", "save_state"): CHECKPOINT,
    ("accelerate", "save_model"): CHECKPOINT,
    ("accelerate", "save_accelerator_state"): CHECKPOINT,
    ("accelerate", "Accelerator.save"): CHECKPOINT,
    ("accelerate", "Accelerator.log"): LOGGING,
    ("accelerate", "gather_for_metrics"): METRICS,
    ("lightning", "_call_callback_hooks"): CALLBACK,
    ("lightning", "_call_callbacks_on_save_checkpoint"): CHECKPOINT,
    ("lightning", "configure_gradient_clipping"): CLIPPING,
    ("lightning", "clip_gradients"): CLIPPING,
    ("lightning", "_clip_gradients"): CLIPPING,
    ("lightning", "_EvaluationLoop.run"): EVALUATION,
    ("lightning", "_PredictionLoop.run"): EVALUATION,
    ("lightning", "_evaluation_step"): EVALUATION,
    ("lightning", "_run_sanity_check"): EVALUATION,
    ("lightning", "save_checkpoint"): CHECKPOINT,
    ("lightning", "Fabric.save"): CHECKPOINT,
    ("lightning", "log_metrics"): LOGGING,
    ("lightning", "log_eval_end_metrics"): LOGGING,
    ("lightning", "update_train_step_metrics"): LOGGING,
    ("lightning", "update_train_epoch_metrics"): LOGGING,
    ("lightning", "LightningModule.log"): LOGGING,
    ("lightning", "log_dict"): LOGGING,
    ("deepspeed", "clip_fp32_gradients"): CLIPPING,
    ("deepspeed", "unscale_and_clip_grads"): CLIPPING,
    ("deepspeed", "scaled_global_norm"): CLIPPING,
    ("deepspeed", "get_grad_norm_direct"): CLIPPING,
    ("deepspeed", "get_global_norm"): CLIPPING,
    ("deepspeed", "eval_batch"): EVALUATION,
    ("deepspeed", "save_checkpoint"): CHECKPOINT,
    ("deepspeed", "save_16bit_model"): CHECKPOINT,
    ("deepspeed", "_save_zero_checkpoint"): CHECKPOINT,
    ("deepspeed", "_write_monitor"): LOGGING,
    ("deepspeed", "_report_progress"): LOGGING,
    ("ray", "report"): "ray.train.report",
}


def framework_of(path: str) -> str | None:
    """The framework whose file that is; None for the user's own, torch's, the standard library's and any other's."""
    for folder in _PACKAGE_FOLDERS:
        _, found, inside = path.rpartition(folder)
        if found:
            return FRAMEWORKS.get(inside.partition("/")[0])
    return None


def word_of(framework: str, function: str) -> str | None:
    """What the framework does in that function; None where nobody has named it."""
    return WORDS.get((framework, function)) or WORDS.get((framework, function.rpartition(".")[2]))
