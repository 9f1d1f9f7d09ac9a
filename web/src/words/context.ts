/** The context of a run in words: command, mesh, machines. Pure. */

import { isRecord } from "../api/copy-bytes";
import type { RunContext } from "../api/documents";
import type { Row } from "../api/text-documents";
import { binary, duration } from "../ui/format";
import { countOf, numbersIn, spansText } from "./ranks";

/** The command, quoted for a shell. */
export function commandText(words: readonly string[] | null): string {
  return (words ?? []).map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");
}

/** `ada on node-7`; a user without a name is shown as `uid N`. */
export function whoText({ user, host }: Pick<RunContext, "user" | "host">): string {
  const who = user && /^\d+$/.test(user) ? `uid ${user}` : user;
  return [who, host].filter(Boolean).join(" on ");
}

/** `dp 4 × tp 2`; empty: no mesh. */
export function meshText(mesh: unknown): string {
  if (!isRecord(mesh)) return "";
  const names = Array.isArray(mesh["names"]) ? mesh["names"].map(String) : [];
  return numbersIn(mesh["shape"])
    .map((size, at) => `${names[at] ?? "dimension"} ${size}`)
    .join(" × ");
}

/** Where the time of the whole run went, from a summary's `time_account`; null: not known. */
export function timeAccountOf(account: unknown): { rows: { key: string; name: string; value: number; text: string }[]; seconds: number; note: string } | null {
  if (!isRecord(account) || !isRecord(account["parts"]) || !isRecord(account["text"])) return null;
  const parts = account["parts"];
  const rows = Object.entries(account["text"]).flatMap(([key, texts]) => {
    const [name, text] = Array.isArray(texts) ? texts.map(String) : [];
    const value = number(parts[key]);
    return name === undefined || text === undefined || value === null ? [] : [{ key, name, value, text }];
  });
  const [seconds, training] = [number(account["seconds"]), number(account["training_time_s"])];
  if (rows.length === 0 || seconds === null || training === null) return null;
  return { rows, seconds, note: `${duration(seconds * 1e9)} in all. Shares in findings and charts are of the training time, ${duration(training * 1e9)}: the steps after warm-up.` };
}

/** Settings as the summary words them: `loader: batch size 8, 2 workers` is one row. */
export function settingRows(settings: unknown): Row[] {
  if (!Array.isArray(settings)) return [];
  return settings.map(String).map((text) => {
    const [name = "", ...rest] = text.split(": ");
    return rest.length === 0 ? { key: text, name: "", value: { form: "text", text } } : { key: text, name, value: { form: "text", text: rest.join(": ") } };
  });
}

/** Ranks that do the same work on other data, from ranges of `[first, count, step]`. */
export function peersText(peers: unknown): string {
  if (!Array.isArray(peers)) return "";
  const runs = peers.filter((run): run is number[] => Array.isArray(run) && run.length === 3 && run.every((one) => typeof one === "number"));
  const many = runs.reduce((sum, run) => sum + Math.max(0, run[1] ?? 0), 0);
  if (many === 0) return "";
  if (many > 4096) return countOf(many, "rank");
  const ranks = runs.flatMap(([first = 0, times = 0, step = 1]) => Array.from({ length: times }, (_, at) => first + at * step));
  return `${countOf(many, "rank")}: ${spansText(ranks)}`;
}

/** Hosts and GPUs from a summary's `host`; `only`: the host name for a single node, which has only a number while active. */
export function machineRows(host: unknown, only: string | null = null): Row[] {
  if (!isRecord(host)) return [];
  const rows: Row[] = [];
  const add = (key: string, text: string): void => {
    if (text) rows.push({ key, name: key, value: { form: "text", text } });
  };
  const nodes = list(host["nodes"]);
  const name = (node: Record<string, unknown>): string => (nodes.length === 1 && only ? only : String(node["node"] ?? ""));
  add("hosts", alike(nodes.map((node) => [`${String(node["cpu_count"] ?? "?")} processors, ${binary(number(node["mem_total"]))}`, name(node)])));
  add("GPUs", alike(list(host["gpus"]).map((gpu) => [`${String(gpu["name"] ?? "GPU")}, ${binary(number(gpu["mem_total"]))}`, `${name(gpu)} ${String(gpu["index"] ?? "")}`])));
  return rows;
}

/** Utilization of the GPUs in the steady steps, from a summary's `host`; null: unknown. */
export function gpuLoad(host: unknown): { words: string; title: string } | null {
  const levels = (isRecord(host) ? list(host["gpus"]) : []).flatMap((gpu) => {
    const level = isRecord(gpu["util_percent"]) ? number(gpu["util_percent"]["median"]) : null;
    return level === null ? [] : [Math.round(level)];
  });
  if (levels.length === 0) return null;
  const [least, most] = [Math.min(...levels), Math.max(...levels)];
  const range = least === most ? `${most}%` : `${least}–${most}%`;
  return { words: `${levels.length === 1 ? "GPU" : `${levels.length} GPUs`} ${range} busy`, title: "GPU utilization, median over the steady steps" };
}

/** `8 × NVIDIA H100, 80.0 GB`; single ones by name. */
function alike(things: readonly (readonly [string, string])[]): string {
  const by = new Map<string, string[]>();
  for (const [what, name] of things) by.set(what, [...(by.get(what) ?? []), name]);
  return [...by.entries()]
    .sort((one, two) => two[1].length - one[1].length)
    .slice(0, 6)
    .map(([what, names]) => (names.length === 1 ? `${names[0]}: ${what}` : `${names.length} × ${what}`))
    .join("; ");
}

function list(value: unknown): Record<string, unknown>[] {
  return Array.isArray(value) ? value.filter(isRecord) : [];
}

function number(value: unknown): number | null {
  return typeof value === "number" ? value : null;
}
