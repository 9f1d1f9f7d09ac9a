/** Short name and meaning of each kind of finding; docs/diagnosis.md has the details. A test compares the two. */

export interface Kind {
  /** As a heading. */
  name: string;
  meaning: string;
}

export const KINDS: Readonly<Record<string, Kind>> = {
  input_bound: { name: "Waiting for data", meaning: "All ranks spend much of each step waiting for the next batch. The training could run faster than the data arrives." },
  h2d_bound: { name: "Copying to the device", meaning: "All ranks spend much of each step copying the batch to the device." },
  comm_bound: { name: "Slow communication", meaning: "All ranks spend much of each step communicating. Only the part common to all ranks counts; the rest is waiting for a rank." },
  comm_hook_bound: { name: "Slow communication hook", meaning: "The function that the script gave DDP to exchange gradients with takes much of each step on all ranks: neither waiting nor transfer." },
  pipeline_bubble: { name: "Pipeline stages wait", meaning: "The stages of a pipeline wait for each other: some are idle while it fills and drains, and more so if they are uneven." },
  optimizer_bound: { name: "Slow optimizer", meaning: "All ranks spend much of each step in the optimizer." },
  between_steps: { name: "Work between steps", meaning: "Evaluation, checkpoints, logging or other work between steps takes much of the time." },
  wait_heavy: { name: "Unexplained time", meaning: "Part of each step is neither input nor forward, backward, communication or optimizer." },
  compute_bound: { name: "Computing", meaning: "Forward, backward and optimizer take nearly all of the time. Nothing is wrong; only faster computation would help." },
  input_straggler: { name: "A rank waits for its data", meaning: "One rank gets its batches later than the others, and in a synchronous job all others wait for it." },
  compute_straggler: { name: "A rank computes more slowly", meaning: "One rank takes longer than the others in forward, backward or the optimizer, and in a synchronous job all others wait for it." },
  h2d_straggler: { name: "A rank copies more slowly", meaning: "One rank takes longer to copy its batch to the device, and all others wait for it." },
  straggler: { name: "A slow rank", meaning: "One rank takes longer than the others, in no single phase or in a user-defined one, and all others wait for it." },
  node_straggler: { name: "A slow node", meaning: "Most ranks of one host are late, but those of most other hosts are not: the machine is the likely cause." },
  rotating_straggler: { name: "The slow rank changes each step", meaning: "In each step a different rank is late by about the same time, as if ranks took turns with extra work." },
  imbalance: { name: "Uneven work", meaning: "The work of the ranks differs by design: batches of unequal length, stages of unequal size, or experts that get unequal numbers of tokens." },
  low_overlap: { name: "Communication is not overlapped", meaning: "Communication could overlap with computation but hardly does, so it lengthens the step." },
  slow_collective: { name: "A slow group", meaning: "The collectives of one group take longer than those of groups like it, or longer than before, for the same bytes." },
  comm_straggler: { name: "A slow link", meaning: "All communication with one rank or one host is slow." },
  group_imbalance: { name: "A group communicates more", meaning: "One of several groups with the same purpose has more to transfer, and the others wait for it." },
  slow_network: { name: "Slow network", meaning: "The network of one host, one link, or the network between all hosts is slow or loses packets." },
  stall: { name: "A single stall", meaning: "A step, or a few in a row, took much longer than the others, once. It is over." },
  jitter: { name: "Recurring slow steps", meaning: "Single steps are repeatedly much longer than the steps around them, some at a fixed interval." },
  drift: { name: "Steps get longer", meaning: "The step time grows steadily over the run." },
  change_point: { name: "Slower from a step on", meaning: "From some step on, until the end of the run, steps take longer than before." },
  throughput_drop: { name: "Slower for a while", meaning: "Ten or more consecutive steps took longer; then the pace recovered." },
  loss_nan: { name: "The loss is not a number", meaning: "The loss that the script noted is NaN or infinite. Nothing is learned from such a step." },
  nan_gradients: { name: "Gradients are not numbers", meaning: "Gradients are NaN or infinite: such a step spoils the weights, or is skipped." },
  loss_spike: { name: "The loss jumped", meaning: "The loss that the script noted rose suddenly and has not come back." },
  exploding_gradients: { name: "Gradients explode", meaning: "The gradients are a hundred times as large as before, or larger, and stay so." },
  vanishing_gradients: { name: "Gradients vanish", meaning: "Next to nothing of the gradient reaches the first layers, so they do not learn." },
  dead_layer: { name: "A layer does not learn", meaning: "A layer with trainable parameters has a gradient of exactly zero in every sampled step." },
  no_gradient_exchange: { name: "Ranks train separately", meaning: "The ranks of one process group split the data but never exchange gradients: each trains a model of its own." },
  uneven_batches: { name: "Batches of different size", meaning: "The ranks' loaders have different batch sizes, but their gradients are averaged with the same weight." },
  unused_parameters: { name: "Parameters without gradients", meaning: "Some trainable parameters never get a gradient. They do not take part in the loss." },
  replica_desync: { name: "Replicas differ", meaning: "Ranks that should hold the same weights do not: they train different models." },
  memory_creep: { name: "Memory grows", meaning: "Memory grows step after step and does not shrink. When it runs out, the run ends." },
  memory_pressure: { name: "A device is nearly full", meaning: "Nearly all memory of a device is in use: a little more would end the run." },
  memory_imbalance: { name: "A rank needs more memory", meaning: "One rank needs more device memory than the others, and the fullest device limits the batch size of all." },
  fragmentation: { name: "Fragmented memory", meaning: "The allocator holds much more device memory than was ever in use at the same time." },
  low_gpu_utilization: { name: "Low GPU utilization", meaning: "The GPUs are busy less than half of the time." },
  gpu_throttled: { name: "A GPU is throttled", meaning: "A GPU runs slower than it could because of heat, power, or a lower clock than the others." },
  cpu_saturated: { name: "CPUs are saturated", meaning: "A host has more runnable tasks than CPUs." },
  ram_pressure: { name: "Host memory is low", meaning: "A host has hardly any memory left, or is swapping." },
  rank_crashed: { name: "A rank died", meaning: "A process ended with an exception or a signal, or vanished. What the other ranks then did is a consequence." },
  rank_lost: { name: "Ranks are unreachable", meaning: "The ranks that still report wait for others on hosts that no longer report." },
  hang_missing_collective: { name: "Missing collective", meaning: "The job hangs: some ranks wait in a collective that another rank has not called." },
  hang_mismatch: { name: "Mismatched collectives", meaning: "The job hangs: at the same point, ranks called different operations, or the same one with different sizes or types." },
  hang_deadlock: { name: "Ranks wait for each other", meaning: "The job hangs: ranks wait for each other in a cycle, so none can continue." },
  hang_input: { name: "Stuck loading data", meaning: "The job hangs: a rank waits in its DataLoader or dataset, and the others wait for it." },
  hang_host: { name: "A process is blocked", meaning: "The job hangs: a process is stopped or waits for a disk, or a C call holds the GIL." },
  hang_device: { name: "A device does not finish", meaning: "The job hangs: a process waits for its device, which does not finish its work." },
  hang_unknown: { name: "The job hangs", meaning: "The job hangs, and the available data does not show which rank is responsible." },
  healthy: { name: "Healthy", meaning: "No problem was found. The sentence names the largest remaining cost besides the training itself." },
  insufficient_data: { name: "Not enough data", meaning: "There are fewer than ten steady steps, too few to judge speed." },
};

/** The same for a hang that is over. */
export const PAST: Readonly<Record<string, Kind>> = {
  rank_lost: { name: "Ranks were unreachable", meaning: "The ranks that still report waited for others on hosts that no longer reported." },
  hang_missing_collective: { name: "Missing collective", meaning: "The job hung: some ranks waited in a collective that another rank had not called." },
  hang_mismatch: { name: "Mismatched collectives", meaning: "The job hung: at the same point, ranks called different operations, or the same one with different sizes or types." },
  hang_deadlock: { name: "Ranks waited for each other", meaning: "The job hung: ranks waited for each other in a cycle, so none could continue." },
  hang_input: { name: "Stuck loading data", meaning: "The job hung: a rank waited in its DataLoader or dataset, and the others waited for it." },
  hang_host: { name: "A process was blocked", meaning: "The job hung: a process was stopped or waited for a disk, or a C call held the GIL." },
  hang_device: { name: "A device did not finish", meaning: "The job hung: a process waited for its device, which did not finish its work." },
  hang_unknown: { name: "The job hung", meaning: "The job hung, and the available data did not show which rank was responsible." },
};

/** `over`: the run or the problem is over, so use the past tense. */
export function kindOf(kind: string, over = false): Kind {
  return (over ? PAST[kind] : undefined) ?? KINDS[kind] ?? { name: kind.replaceAll("_", " "), meaning: "" };
}

/** Whether the job hangs or lost a rank; such findings come first. */
export function isStop(kind: string): boolean {
  return kind.startsWith("hang_") || kind === "rank_crashed" || kind === "rank_lost";
}
