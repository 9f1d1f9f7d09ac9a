/** Stacks for display: user code, library frames in between, and groups at the same place. Pure. */

import type { Place, StackGroup, ThreadStack } from "../api/hang-documents";

/** Files of installed packages, Python, torch or Stepscope; the same rule as in flight/stacks.py. */
const NOT_USERS =
  /(?:^|\/)(?:site-packages|dist-packages)\/|^<|(?:^|\/)lib(?:64)?\/python\d[\d.]*\/|(?:^|\/)python\d+\.zip\/|(?:^|\/)torch\/(?:distributed|nn|autograd|utils|optim|multiprocessing|cuda|fx|jit|_\w+)(?:\/|\.py)|(?:^|\/)stepscope\/(?:recorder|agent|cli|flight|hangs|ring|records)\//;
const OURS = /(?:^|\/)stepscope\/recorder\/(?:hooks\/)?\w+\.py$/;

export function isUsers(file: string): boolean {
  return file !== "" && !NOT_USERS.test(file);
}

/** A library file from its package on; a user file with its last folder. */
export function shortFile(file: string): string {
  const at = file.lastIndexOf("-packages/");
  return at >= 0 ? file.slice(at + "-packages/".length) : file.split("/").slice(-2).join("/");
}

export function placeText(place: Place | null): string {
  if (place === null) return "";
  const where = `${shortFile(place.file)}${place.line ? `:${place.line}` : ""}`;
  return place.function && place.function !== "<module>" ? `${where} in ${place.function}` : where;
}

/** Consecutive frames of user code, or of libraries in between. */
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

/** The innermost line of user code, else the innermost line. */
export function placeOf(threads: readonly ThreadStack[]): Place | null {
  const frames = (mainThread(threads) ?? threads[0])?.frames ?? [];
  return frames.find((frame) => isUsers(frame.file)) ?? frames[0] ?? null;
}

/**
 * Merge groups whose main threads are equal to the line, even if helper threads differ. Groups with a rank in `first` come
 * first, then small groups, which are the exceptions.
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
