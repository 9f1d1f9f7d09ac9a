"""The public programs, as data: where they come from, how they are started, and what is known of each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from public import data

__all__ = ["FAULTS", "PROGRAMS", "REPOSITORIES", "Fault", "Program", "Repository"]


@dataclass(frozen=True, kw_only=True)
class Repository:
    address: str
    commit: str
    """That the programs were tried at; another one runs with a message."""


REPOSITORIES = {
    "examples": Repository(
        address="https://github.com/pytorch/examples", commit="77f55b912142e11fcfdf5b530231fb9c52f181e8"
    ),
    "nanoGPT": Repository(
        address="https://github.com/karpathy/nanoGPT", commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
    ),
    "pytorch-image-models": Repository(
        address="https://github.com/huggingface/pytorch-image-models",
        commit="aa4b5850c1543fa488abf260f18390eda46cf85d",
    ),
    "litgpt": Repository(
        address="https://github.com/Lightning-AI/litgpt", commit="26857050fe3ff627cd714fe92f5838f51a3d5efa"
    ),
    "accelerate": Repository(
        address="https://github.com/huggingface/accelerate", commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
    ),
}
"""By the name of the checkout's folder."""

PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# With --cpu it would start one process; --multi_gpu starts as many as requested, which then find no GPU.
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    repository: str
    script: str
    """In the checkout; "-m NAME" starts a module of it."""
    args: str = ""
    """As typed; no argument contains a space."""
    launcher: tuple[str, ...] = PYTHON
    ranks: int = 1
    write_data: Callable[[Path], None] = lambda folder: None
    """Called with the folder in which ``work``, the program's working directory, is."""
    links: tuple[str, ...] = ()
    """Files of the checkout that the program opens in its working directory."""
    import_path: tuple[str, ...] = ()
    """Folders of the checkout that the program imports from, besides that of its script."""
    variables: dict[str, str] = field(default_factory=dict)
    alteration: str = ""
    """What is changed in it at its start (``altered.py``), where no option of its own makes it short enough."""
    needs: tuple[str, ...] = ("torchvision",)
    """Packages."""
    steps: int | re.Pattern[str]
    """Optimizer steps that each rank makes, or where the program prints their number (its last match counts)."""
    extra_steps: int = 0
    """Steps that Stepscope counts in addition, for the reason in ``note``."""
    values: re.Pattern[str]
    """The numbers in its output that must be the same bare and recorded."""
    repeatable: bool = True
    """Whether two bare runs print the same numbers."""
    expected: frozenset[str] = frozenset()
    """Kinds of findings that are true of it; "KIND:WORD" if its title has to contain that word."""
    note: str = ""


def _mnist(folder: Path) -> None:
    data.write_mnist(folder / "data", train=1600, test=500)


def _mnist_here(folder: Path) -> None:
    data.write_mnist(folder / "work" / "data", train=640, test=320)


def _vae(folder: Path) -> None:
    data.write_mnist(folder / "data", train=5120, test=1280)
    (folder / "work" / "results").mkdir()


def _images(folder: Path) -> None:
    data.write_images(folder / "images", train=160, test=8)


def _timm_images(folder: Path) -> None:
    data.write_images(folder / "images", train=320, test=32, test_name="validation")


def _glue(folder: Path) -> None:
    data.write_glue(folder / "work", train=640, test=64)


def _pets(folder: Path) -> None:
    data.write_pets(folder / "pets", count=40)
    data.write_resnet(folder / "hub")


LOSS = re.compile(r"(?i)loss\D{0,12}?(-?\d+\.\d+(?:e-?\d+)?)")
IMAGENET_VALUES = re.compile(r"(?:Loss|Acc@\d) +(\d\S* \( *\d[^)]*\))")
NANO = (
    "--device=cpu --dtype=float32 --dataset=tiny --gradient_accumulation_steps=1 --batch_size=8 "
    "--block_size=64 --n_layer=3 --n_head=4 --n_embd=128 --max_iters=149 --lr_decay_iters=149 "
    "--warmup_iters=10 --eval_interval=75 --eval_iters=5"
)
NLP_VALUES = re.compile(r"epoch \d+: (\{.*\})")
EVALUATES = frozenset({"between_steps:evaluation"})
"""Of programs that evaluate after each epoch: with so little data it takes a large part of the time."""
IN_PROCESS = frozenset({"input_bound"}) | EVALUATES
"""Of programs that also read samples in the training process: most of a small model's step is reading."""

PROGRAMS = (
    Program(
        name="mnist",
        repository="examples",
        script="mnist/main.py",
        args="--epochs 3 --no-accel --save-model",
        write_data=_mnist,
        steps=75,
        values=LOSS,
        expected=IN_PROCESS,
    ),
    Program(
        name="vae",
        repository="examples",
        script="vae/main.py",
        args="--epochs 4 --no-accel",
        write_data=_vae,
        steps=160,
        values=LOSS,
        expected=IN_PROCESS,
    ),
    Program(
        name="dcgan",
        repository="examples",
        script="dcgan/main.py",
        args="--dataset fake --niter 3 --manualSeed 1 --ngf 8 --ndf 8",
        steps=48,
        extra_steps=1,
        values=re.compile(r"Loss_D: (.*)"),
        note="two optimizers: the first step of the discriminator counts separately",
    ),
    Program(
        name="actor_critic",
        repository="examples",
        script="reinforcement_learning/actor_critic.py",
        args="--log-interval 1",
        alteration="episodes",
        needs=("gymnasium",),
        steps=re.compile(r"Episode (\d+)"),
        values=re.compile(r"reward: (\d+\.\d+)"),
        note="a step is an episode, whose length differs by design; 150 episodes instead of as many as it takes",
    ),
    Program(
        name="time_sequence",
        repository="examples",
        script="time_sequence_prediction/train.py",
        args="--steps 6",
        write_data=lambda folder: data.write_sine_waves(folder / "work" / "traindata.pt", waves=20, points=60),
        needs=("matplotlib",),
        variables={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        steps=6,
        values=LOSS,
        expected=frozenset({"between_steps"}),
        note="LBFGS: a step has 20 evaluations; the pictures between the steps take as long as the training",
    ),
    Program(
        name="word_language_model",
        repository="examples",
        script="word_language_model/main.py",
        args="--data ../corpus --emsize 64 --nhid 64 --epochs 3 --use-optimizer --lr 0.002 --log-interval 10",
        write_data=lambda folder: data.write_text_corpus(folder / "corpus", train_lines=1700),
        needs=(),
        steps=153,
        values=LOSS,
        expected=EVALUATES,
        note="input is [sequence, batch]",
    ),
    Program(
        name="word_transformer",
        repository="examples",
        script="word_language_model/main.py",
        args=(
            "--data ../corpus --emsize 64 --nhid 64 --epochs 3 --use-optimizer --lr 0.002 --log-interval 10 "
            "--model Transformer"
        ),
        write_data=lambda folder: data.write_text_corpus(folder / "corpus", train_lines=1700),
        needs=(),
        steps=153,
        values=LOSS,
        expected=EVALUATES,
    ),
    Program(
        name="forward_forward",
        repository="examples",
        script="mnist_forward_forward/main.py",
        args="--epochs 80 --no_accel --train_size 640 --test_size 320",
        write_data=_mnist_here,
        steps=160,
        values=re.compile(r"(?:Loss: |error:) *(\d+\.\d+)"),
        repeatable=False,
        note="never sets its seed; calls module.forward() directly; one optimizer per layer, one after the other",
    ),
    Program(
        name="hogwild",
        repository="examples",
        script="mnist_hogwild/main.py",
        args="--epochs 3 --num-processes 2",
        write_data=_mnist,
        ranks=2,
        steps=75,
        values=re.compile(r"Train Epoch: (\d+ \[\d+/\d+)"),
        repeatable=False,
        expected=IN_PROCESS,
        note="two processes train one shared model without any exchange; losses differ between two bare runs",
    ),
    Program(
        name="imagenet",
        repository="examples",
        script="imagenet/main.py",
        args="../images -a mobilenet_v3_small -b 8 -j 2 --epochs 3 --seed 1 --no-accel --lr 0.001",
        write_data=_images,
        steps=60,
        values=IMAGENET_VALUES,
        expected=EVALUATES,
    ),
    Program(
        name="imagenet_2",
        repository="examples",
        script="imagenet/main.py",
        args=(
            "../images -a mobilenet_v3_small -b 8 -j 1 --epochs 4 --seed 1 --no-accel --lr 0.001 --dist-url "
            "env:// --dist-backend gloo"
        ),
        launcher=TORCHRUN,
        ranks=2,
        write_data=_images,
        steps=40,
        values=IMAGENET_VALUES,
        expected=frozenset({"no_gradient_exchange"}) | EVALUATES,
        note="on a CPU it never wraps the model in DDP: the ranks train different models",
    ),
    Program(
        name="nanoGPT",
        repository="nanoGPT",
        script="train.py",
        args=f"{NANO} --compile=False",
        links=("configurator.py",),
        write_data=lambda folder: data.write_token_files(folder / "work" / "data" / "tiny", characters=60_000),
        needs=(),
        steps=150,
        values=LOSS,
        expected=EVALUATES,
    ),
    Program(
        name="nanoGPT_compile",
        repository="nanoGPT",
        script="train.py",
        args=f"{NANO} --compile=True",
        links=("configurator.py",),
        write_data=lambda folder: data.write_token_files(folder / "work" / "data" / "tiny", characters=60_000),
        needs=(),
        steps=150,
        values=LOSS,
        expected=EVALUATES,
    ),
    Program(
        name="timm",
        repository="pytorch-image-models",
        script="train.py",
        args=(
            "--data-dir ../images --model test_resnet -b 8 --epochs 2 --device cpu --workers 1 --log-interval 1 "
            "--num-classes 2 --cooldown-epochs 0 --warmup-epochs 0"
        ),
        write_data=_timm_images,
        steps=80,
        values=re.compile(r"Loss: *(\S+ \(\S+\))"),
        expected=EVALUATES,
    ),
    Program(
        name="litgpt",
        repository="litgpt",
        script="-m litgpt",
        args=(
            "finetune_lora ../checkpoint --data JSON --data.json_path ../data.json --data.val_split_fraction "
            "0.1 --data.num_workers 1 --train.epochs 2 --train.global_batch_size 8 --train.micro_batch_size 4 "
            "--precision 32-true --eval.interval 25 --train.lr_warmup_steps 5 --out_dir out"
        ),
        import_path=("",),
        write_data=lambda folder: data.write_instructions(folder, count=320),
        needs=("lightning", "jsonargparse", "yaml"),
        steps=re.compile(r"step (\d+)"),
        values=re.compile(r"loss train: (\S+), val: (\S+)"),
        expected=EVALUATES,
    ),
    Program(
        name="accelerate_nlp",
        repository="accelerate",
        script="examples/nlp_example.py",
        args="--cpu",
        write_data=_glue,
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        steps=120,
        values=NLP_VALUES,
        expected=EVALUATES,
    ),
    Program(
        name="accelerate_nlp_2",
        repository="accelerate",
        script="examples/nlp_example.py",
        args="--cpu",
        launcher=ACCELERATE,
        ranks=2,
        write_data=_glue,
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        steps=60,
        values=NLP_VALUES,
        expected=EVALUATES,
    ),
    Program(
        name="accelerate_cv",
        repository="accelerate",
        script="examples/cv_example.py",
        args="--cpu --data_dir ../pets",
        write_data=_pets,
        variables={"HF_HUB_CACHE": "../hub"},
        needs=("accelerate", "timm", "torchvision"),
        steps=3,
        values=re.compile(r"epoch \d+: (\S+)"),
        expected=EVALUATES,
    ),
    Program(
        name="accelerate_accumulation_2",
        repository="accelerate",
        script="examples/by_feature/gradient_accumulation.py",
        args="--cpu --gradient_accumulation_steps 2",
        launcher=ACCELERATE,
        ranks=2,
        write_data=_glue,
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        steps=30,
        values=NLP_VALUES,
        expected=EVALUATES,
    ),
    Program(
        name="accelerate_local_sgd_2",
        repository="accelerate",
        script="examples/by_feature/local_sgd.py",
        args="--cpu --local_sgd_steps 5",
        launcher=ACCELERATE,
        ranks=2,
        write_data=_glue,
        needs=("accelerate", "transformers", "datasets", "evaluate"),
        steps=60,
        values=NLP_VALUES,
        expected=EVALUATES,
        note="weights differ between two averages by design",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    program: str
    alteration: str
    """In ``altered.py``."""
    kinds: frozenset[str]
    """Of the first finding about the job."""
    rank: int | None = None
    words: str = ""
    """A pattern that its title, evidence or advice contains."""
    code: int = 0


FAULTS = (
    Fault(
        name="mnist/slow_data",
        program="mnist",
        alteration="slow_data",
        kinds=frozenset({"input_bound"}),
        words=r"altered\.py:\d+",
    ),
    Fault(
        name="accelerate_nlp_2/slow_forward",
        program="accelerate_nlp_2",
        alteration="slow_forward@1",
        kinds=frozenset({"compute_straggler"}),
        rank=1,
        words=r"altered\.py:\d+",
    ),
    Fault(
        name="nanoGPT/slow_save",
        program="nanoGPT",
        alteration="slow_save",
        kinds=frozenset({"between_steps", "stall"}),  # the program saves once
        words=r"save|checkpoint",
    ),
    Fault(
        name="nanoGPT/leak",
        program="nanoGPT",
        alteration="leak",
        kinds=frozenset({"memory_creep"}),
        words=r"1048576",  # elements of what the list holds; the list itself has no name
    ),
    Fault(
        name="word_transformer/nan",
        program="word_transformer",
        alteration="nan",
        kinds=frozenset({"nan_gradients", "loss_nan"}),
        words=r"12",
    ),
    Fault(
        name="imagenet/crash",
        program="imagenet",
        alteration="crash",
        kinds=frozenset({"rank_crashed"}),
        words=r"the injected fault of make public",
        code=1,
    ),
)
