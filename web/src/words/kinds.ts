/** What each kind of finding is called and means, in short; docs/diagnosis.md has all of it. A test holds the two together. */

export interface Kind {
  /** As a heading. */
  name: string;
  meaning: string;
}

export const KINDS: Readonly<Record<string, Kind>> = {
  input_bound: { name: "Waiting for data", meaning: "All ranks spend much of each step waiting for the next batch. The training could go faster than the data comes." },
  h2d_bound: { name: "Copying to the device", meaning: "All ranks spend much of each step copying the batch to the device." },
  comm_bound: { name: "Exchange takes long", meaning: "All ranks spend much of each step exchanging data. Only what every rank has of it counts: the rest would be waiting for a rank." },
  pipeline_bubble: { name: "Pipeline stages wait", meaning: "The stages of a pipeline wait for each other: while it fills and drains some of them have nothing to do, and more so if they are uneven." },
  optimizer_bound: { name: "Optimizer takes long", meaning: "All ranks spend much of each step in the optimizer." },
  between_steps: { name: "Work between steps", meaning: "Evaluation, checkpoints, logging or something of your own between two steps takes much of the time." },
  wait_heavy: { name: "Time that no phase explains", meaning: "Inside the step there is time that is neither input nor forward, backward, exchange or optimizer." },
  compute_bound: { name: "Computing", meaning: "Forward, backward and optimizer take nearly all of the time. Nothing is wrong; only a faster computation makes it faster." },
  input_straggler: { name: "A rank waits for its data", meaning: "One rank gets its batches later than its peers do, and in a synchronous job all others wait for it." },
  compute_straggler: { name: "A rank computes slower", meaning: "One rank takes longer than its peers in forward, backward or the optimizer, and in a synchronous job all others wait for it." },
  h2d_straggler: { name: "A rank copies slower", meaning: "One rank takes longer to copy its batch to the device, and all others wait for it." },
  straggler: { name: "A slow rank", meaning: "One rank takes longer than its peers, in no single phase or in one of your own, and all others wait for it." },
  node_straggler: { name: "A slow node", meaning: "Most ranks of one host are late while those of most other hosts are not: suspect the machine." },
  rotating_straggler: { name: "Another slow rank each step", meaning: "In each step another rank is late by about the same, as with work that one rank does in turn." },
  imbalance: { name: "Uneven work", meaning: "The work of the ranks differs by design: batches of unequal length, stages of unequal size, or experts that get unequal numbers of tokens." },
  low_overlap: { name: "Exchange is not hidden", meaning: "An exchange that could run beside the computation hardly does, so that it shows in the step." },
  slow_collective: { name: "A slow group", meaning: "The collectives of one group take longer than those of groups like it, or longer than before, for the same bytes." },
  comm_straggler: { name: "A slow link", meaning: "Every exchange with one rank, or with one host, is slow." },
  group_imbalance: { name: "A group exchanges more", meaning: "One of several groups for the same purpose has more to exchange, and the others wait for it." },
  slow_network: { name: "Slow network", meaning: "The network of one host, one link, or the network between all hosts is slow or loses packets." },
  stall: { name: "It stood still once", meaning: "A step, or a few in a row, took much longer than the others, once. It is over." },
  jitter: { name: "Slow steps that come again", meaning: "Single steps are much longer than their neighbours, again and again; with a period where they have one." },
  drift: { name: "Steps get longer and longer", meaning: "The length of the steps grows steadily over the run." },
  change_point: { name: "Slower from a step on", meaning: "From one step on, and until the end, steps take longer than before." },
  throughput_drop: { name: "Slower for a while", meaning: "For a stretch of ten steps or more the steps were longer; then they recovered." },
  memory_creep: { name: "Memory grows", meaning: "Memory grows step after step and does not fall back. Some time it runs out, and that ends the run." },
  memory_pressure: { name: "A device is nearly full", meaning: "Nearly all memory of a device is needed: a little more and the run ends." },
  memory_imbalance: { name: "A rank needs more memory", meaning: "One rank needs more device memory than its peers, and the fullest device limits the batch of all." },
  fragmentation: { name: "Fragmented memory", meaning: "The allocator holds much more device memory than was ever in use at once." },
  low_gpu_utilisation: { name: "GPUs have little to do", meaning: "The GPUs are busy for less than half of the time." },
  gpu_throttled: { name: "A GPU is held back", meaning: "A GPU runs slower than it could: heat, power, or a clock below that of its peers." },
  cpu_saturated: { name: "Processors are full", meaning: "More tasks want to run on a host than it has processors." },
  ram_pressure: { name: "Host memory is short", meaning: "A host has hardly any memory left, or moves it to disk." },
  rank_crashed: { name: "A rank died", meaning: "A process ended by an exception, a signal, or without a word. What the other ranks then did follows from it." },
  rank_lost: { name: "Ranks are out of reach", meaning: "The ranks that are known of wait for others, on hosts that nobody hears of any more." },
  hang_missing_collective: { name: "A rank did not come", meaning: "The job stands still: some ranks wait in a collective that another rank has not called." },
  hang_mismatch: { name: "Ranks call different things", meaning: "The job stands still: at the same place ranks called different operations, sizes or types." },
  hang_deadlock: { name: "They wait for each other", meaning: "The job stands still: ranks wait for each other in a circle, so that nobody can go on." },
  hang_input: { name: "Stuck in the data", meaning: "The job stands still: a rank waits in its DataLoader or dataset, and the others wait for it." },
  hang_host: { name: "A process stands still", meaning: "The job stands still: a process is stopped, waits for a disk, or a call of C never gives Python back." },
  hang_device: { name: "A device does not finish", meaning: "The job stands still: a process waits for its device, which does not end what it was given." },
  hang_unknown: { name: "It stands still", meaning: "The job stands still, and from what can be seen nobody can be blamed." },
  healthy: { name: "Healthy", meaning: "Nothing that is looked for is wrong. The sentence names the largest thing that is left beside the training itself." },
  insufficient_data: { name: "Too little to judge by", meaning: "There are fewer than ten steady steps. Nothing is said about speed before." },
};

/** The same of a standstill that is over. */
export const PAST: Readonly<Record<string, Kind>> = {
  rank_lost: { name: "Ranks were out of reach", meaning: "The ranks that were known of waited for others, on hosts that nobody heard of any more." },
  hang_missing_collective: { name: "A rank did not come", meaning: "The job stood still: some ranks waited in a collective that another rank had not called." },
  hang_mismatch: { name: "Ranks called different things", meaning: "The job stood still: at the same place ranks called different operations, sizes or types." },
  hang_deadlock: { name: "They waited for each other", meaning: "The job stood still: ranks waited for each other in a circle, so that nobody could go on." },
  hang_input: { name: "Stuck in the data", meaning: "The job stood still: a rank waited in its DataLoader or dataset, and the others waited for it." },
  hang_host: { name: "A process stood still", meaning: "The job stood still: a process was stopped, waited for a disk, or a call of C never gave Python back." },
  hang_device: { name: "A device did not finish", meaning: "The job stood still: a process waited for its device, which did not end what it was given." },
  hang_unknown: { name: "It stood still", meaning: "The job stood still, and from what could be seen nobody can be blamed." },
};

/** `over`: the run is, or what was found. */
export function kindOf(kind: string, over = false): Kind {
  return (over ? PAST[kind] : undefined) ?? KINDS[kind] ?? { name: kind.replaceAll("_", " "), meaning: "" };
}

/** Of a job that stands, or lost a rank: told before all else. */
export function isStop(kind: string): boolean {
  return kind.startsWith("hang_") || kind === "rank_crashed" || kind === "rank_lost";
}
