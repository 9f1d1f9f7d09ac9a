"""The hooks: one module for each part of torch that is hooked.

What is hooked, its price, and the alternative that was dearer (µs in a tight loop, 2-core Arm, torch 2.13; CUDA rows on
an H200; inside a training loop everything costs 3 to 5 times as much):

- forward, eval | ``__call__`` of the class of the outermost modules | 2 per call | forward hooks: 9 to 12 per call;
  ``nn.Module.__call__`` permanently: 1.5 per call of any module
- backward | ``torch.autograd.backward`` and ``grad`` | 2.4 | full backward hooks: 195 per module
- optimizer | torch's global optimizer hooks, ``GradScaler.step`` | 5.6 | a patch per class
- DeepSpeed | ``DeepSpeedEngine.backward``, ``_take_model_step`` | 1.4 each
- input | ``_BaseDataLoaderIter.__next__``, ``DataLoader.__iter__`` | 0.8
- comm | methods of ``ProcessGroup``, ``Work.wait`` | 2.3 per call, 1.9 per wait | a dispatch mode: 15 per op
- DDP | DDP's own logging | 4 | its only comm hook, which belongs to the user
- device times | pooled CUDA events | 2.5 per event, 0.5 per query | ``synchronize``
- device memory | the allocator's raw statistics, at most 10 per s | 14 (47 in place) | ``memory_allocated()``: 137

Entering and leaving a phase (two words) takes 1.4 µs.  All this is in Python; ``native.py`` is for ordinary calls in C.
"""
