/** How processes and attempts ended, in sentences. The summary may be from another version, so it is read defensively. Pure. */

import { count, cutText, duration } from "../ui/format";
import { isRecord } from "./evidence";
import { countOf } from "./ranks";

export interface RankError {
  rank: number | null;
  attempt: number;
  pid: number;
  type: string;
  message: string;
  step: number | null;
  /** Raised by the script that started the ranks and does not train itself. */
  script: boolean;
  victim: boolean;
  exitCodes: Record<string, number>;
  traceback: string;
  /** Without the frames of libraries; the whole one in summaries of earlier versions. */
  short: string;
}

export interface Attempt {
  attempt: number;
  world_size: number | null;
  ranks: number;
  first_step: number | null;
  last_step: number | null;
  seconds: number | null;
  pause_s: number | null;
  end: string | null;
}

const LONGEST = 240;
const SIGNALS: Readonly<Record<number, string>> = { 1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM" };

export function errorsOf(value: unknown): RankError[] {
  if (!Array.isArray(value)) return [];
  return value.filter(isRecord).map((one) => ({
    rank: number(one["rank"]),
    attempt: number(one["attempt"]) ?? 0,
    pid: number(one["pid"]) ?? 0,
    type: String(one["type"] ?? ""),
    message: String(one["message"] ?? ""),
    step: number(one["step"]),
    script: one["script"] === true,
    victim: one["victim"] === true,
    exitCodes: isRecord(one["exit_codes"]) ? Object.fromEntries(Object.entries(one["exit_codes"]).filter((code): code is [string, number] => typeof code[1] === "number")) : {},
    traceback: String(one["traceback"] ?? ""),
    short: String(one["traceback_short"] ?? one["traceback"] ?? ""),
  }));
}

/** Original errors, and those that follow from them: launchers only report how their ranks ended. */
export function toldFirst(errors: readonly RankError[]): { own: RankError[]; followed: RankError[] } {
  const own = errors.filter((error) => !error.victim && (error.rank !== null || error.script));
  return { own, followed: errors.filter((error) => !own.includes(error)) };
}

/** `After that, rank 0 and the launcher ended`: launchers are not ranks, and a rank may have reported twice. */
export function followedText(followed: readonly RankError[], own: readonly RankError[]): string {
  const began = new Set(own.map((error) => error.rank));
  const ranks = [...new Set(followed.map((error) => error.rank))].filter((rank): rank is number => rank !== null && !began.has(rank));
  const launcher = followed.some((error) => error.rank === null && !error.script);
  const first = errorText(followed[0]);
  if (ranks.length === 0) return first;
  const who = ranks.length === 1 ? `rank ${ranks[0]}` : `${ranks.length} other ranks`;
  return `After that, ${who}${launcher ? " and the launcher" : ""} ended: ${first}`;
}

/** `Rank 1 raised ValueError in step 6: no such label`. */
export function errorText(error: RankError | undefined): string {
  if (error === undefined) return "";
  const line = error.message.replace(/[=_*-]{4,}/g, " ").replace(/\s+/g, " ").trim();
  const message = cutText(line, LONGEST);
  const who = error.script ? "The script" : error.rank === null ? "The launcher" : `Rank ${error.rank}`;
  const where = error.step === null ? "" : ` in step ${count(error.step)}`;
  const codes = Object.entries(error.exitCodes)
    .slice(0, 4)
    .map(([rank, code]) => `rank ${rank} ${codeText(code)}`);
  return `${who} raised ${error.type || "an exception"}${where}${message ? `: ${message}` : ""}${codes.length ? ` (${codes.join(", ")})` : ""}`;
}

/** `Traceback of rank 1, step 6`: for an error that the verdict tells. */
export function tracebackTitle(error: RankError): string {
  const who = error.script ? "the script" : error.rank === null ? "the launcher" : `rank ${error.rank}`;
  return `Traceback of ${who}${error.step === null ? "" : `, step ${count(error.step)}`}`;
}

/** `ended by SIGKILL`, `exit code 3`. */
export function codeText(code: number): string {
  return code < 0 ? `ended by ${SIGNALS[-code] ?? `signal ${-code}`}` : `exit code ${code}`;
}

export function attemptsOf(value: unknown): Attempt[] {
  if (!Array.isArray(value)) return [];
  return value.filter(isRecord).map((one) => ({
    attempt: number(one["attempt"]) ?? 0,
    world_size: number(one["world_size"]),
    ranks: number(one["ranks"]) ?? 0,
    first_step: number(one["first_step"]),
    last_step: number(one["last_step"]),
    seconds: number(one["seconds"]),
    pause_s: number(one["pause_s"]),
    end: typeof one["end"] === "string" ? one["end"] : null,
  }));
}

export function attemptText(one: Attempt): string {
  const who = one.world_size === null ? "" : ` of ${countOf(one.world_size, "rank")}`;
  const steps = one.first_step === null || one.last_step === null ? "no known steps" : `steps ${count(one.first_step)}–${count(one.last_step)}`;
  const long = one.seconds === null ? "" : ` in ${duration(one.seconds * 1e9)}`;
  return `Attempt ${one.attempt}${who}: ${steps}${long}${one.end === null ? ", still running" : `; ${one.end}`}`;
}

function number(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
