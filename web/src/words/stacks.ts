/** Stacks as people read them: which lines are their own, what was called through, who is at the same place. Pure. */

import type { Place, StackGroup, ThreadStack } from "../api/hang-documents";

/** As flight/stacks.py has it: installed, Python's own, torch's, or ours. */
const NOT_USERS =
  /(?:^|\/)(?:site-packages|dist-packages)\/|^<|(?:^|\/)lib(?:64)?\/python\d[\d.]*\/|(?:^|\/)python\d+\.zip\/|(?:^|\/)torch\/(?:distributed|nn|autograd|utils|optim|multiprocessing|cuda|fx|jit|_\w+)(?:\/|\.py)|(?:^|\/)stepscope\/(?:recorder|agent|cli|flight|hangs|ring|records)\//;
const OURS = /(?:^|\/)stepscope\/recorder\/(?:hooks\/)?\w+\.py$/;

export function isUsers(file: string): boolean {
  return file !== "" && !NOT_USERS.test(file);
}

/** Of a library from its package on, of the user's own the last folder and the file. */
export function shortFile(file: string): string {
  const at = file.lastIndexOf("-packages/");
  return at >= 0 ? file.slice(at + "-packages/".length) : file.split("/").slice(-2).join("/");
}

export function placeText(place: Place | null): string {
  if (place === null) return "";
  const where = `${shortFile(place.file)}${place.line ? `:${place.line}` : ""}`;
  return place.function && place.function !== "<module>" ? `${where} in ${place.function}` : where;
}

/** Lines that stand together: the user's own one by one, what lies between in one piece. */
export interface Piece {
  users: boolean;
  frames: Place[];
}

export function piecesOf(frames: readonly Place[]): Piece[] {
  const pieces: Piece[] = [];
  for (const frame of frames) {
    if (OURS.test(frame.file)) continue;
    const users = isUsers(frame.file);
    const last = pieces.at(-1);
    if (last?.users === users) last.frames.push(frame);
    else pieces.push({ users, frames: [frame] });
  }
  return pieces;
}

export function mainThread(threads: readonly ThreadStack[]): ThreadStack | null {
  return threads.find((thread) => thread.main) ?? null;
}

/** Where it is: the innermost line of the user's own, else of anybody's. */
export function placeOf(threads: readonly ThreadStack[]): Place | null {
  const frames = (mainThread(threads) ?? threads[0])?.frames ?? [];
  return frames.find((frame) => isUsers(frame.file)) ?? frames[0] ?? null;
}

/**
 * Those whose main threads are the same to the line together, though their helper threads may not be; groups with one of
 * `first` before the others, then the smallest, which are the odd ones.
 */
export function alike(groups: readonly StackGroup[], first: readonly number[]): StackGroup[] {
  const found = new Map<string, StackGroup>();
  for (const group of groups) {
    const key = JSON.stringify([group.workers_of, mainThread(group.threads)?.frames ?? group.threads]);
    const known = found.get(key);
    const threads = known !== undefined && known.threads.length >= group.threads.length ? known.threads : group.threads;
    found.set(key, { ...group, threads, ranks: [...new Set([...(known?.ranks ?? []), ...group.ranks])].sort((one, two) => one - two) });
  }
  const leads = (group: StackGroup): number => (group.ranks.some((rank) => first.includes(rank)) ? 0 : 1);
  return [...found.values()].sort((one, two) => leads(one) - leads(two) || Number(two.workers_of) - Number(one.workers_of) || one.ranks.length - two.ranks.length || (one.ranks[0] ?? 0) - (two.ranks[0] ?? 0));
}
