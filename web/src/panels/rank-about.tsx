/** A rank's identity, current state and settings. */

import type { RankDocument } from "../api/documents";
import { bytes, clock, count, cutText, duration } from "../ui/format";

/** The current state of a rank, in a sentence. */
export function stateWords(rank: RankDocument, nowWallNs: number): string {
  const now = rank.now as Partial<{ state: string; standing: string | null; live_phase: string | null; live_step: number; live_since_wall_ns: number; ended_wall_ns: number | null; last_step: number }>;
  const ended = now.ended_wall_ns;
  if (typeof ended === "number") {
    const how = { exited: "Exited normally", exception: "Ended with an exception", vanished: "Killed or vanished" }[now.state ?? ""] ?? `Ended (${now.state})`;
    return `${how} at ${clock(ended)}, after step ${count(now.last_step)}.`;
  }
  if (now.state !== "running") return now.state === "starting" ? "Starting; no step yet." : `State: ${now.state}.`;
  const since = now.live_since_wall_ns ?? 0;
  const long = since > 0 && nowWallNs > since ? ` for ${duration(nowWallNs - since)}` : "";
  if (now.standing) return `${now.standing.charAt(0).toUpperCase()}${now.standing.slice(1)}${now.live_phase ? `, in ${now.live_phase}` : ""}${long}, step ${count(now.live_step)}.`;
  return now.live_phase ? `In ${now.live_phase}${long}, step ${count(now.live_step)}.` : `Running, step ${count(now.live_step)}.`;
}

export function Identity({ rank }: { rank: RankDocument }) {
  const who = rank.identity;
  const now = rank.now;
  const text = (value: unknown): string => (typeof value === "string" || typeof value === "number" ? String(value) : "");
  const device = [text(who["device"]), text(who["device_name"])].filter(Boolean).join(", ");
  const index = typeof who["device_index"] === "number" && who["device_index"] >= 0 ? ` ${who["device_index"]}` : "";
  const missing = ["lost", "torn", "hook_failures"].filter((name) => typeof now[name] === "number" && now[name] > 0);
  const rows: [string, string][] = [
    ["host", text(who["host"])],
    ["process", text(who["pid"])],
    ["local rank", text(who["local_rank"])],
    ["device", device + index],
    ["backend", text(who["backend"])],
    ["torch", text(who["torch"])],
    ["Python", text(who["python"])],
    ["script", text(who["script"])],
    ...missing.map((name): [string, string] => [name.replace("_", " "), text(now[name])]),
  ];
  return <Pairs rows={rows.filter(([, value]) => value !== "")} />;
}

const MOST_FACTS = 60;
const LONGEST = 160;

export function Facts({ facts }: { facts: Record<string, unknown> }) {
  const groups = Object.entries(facts).map(([name, value]): [string, [string, string][]] => [name, pairsOf(name, value)]);
  const known = groups.filter(([, rows]) => rows.length > 0);
  if (known.length === 0) return <p class="muted">No settings recorded yet.</p>;
  return <Pairs rows={known.flatMap(([, rows]) => rows).slice(0, MOST_FACTS)} />;
}

function Pairs({ rows }: { rows: [string, string][] }) {
  return (
    <dl class="rank-pairs">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Flatten to rows such as `loader.num_workers`. */
export function pairsOf(name: string, value: unknown): [string, string][] {
  if (value === null || value === undefined) return [];
  if (typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value).flatMap(([key, inner]) => pairsOf(`${name}.${key}`, inner));
  }
  return [[name, factWords(name, value)]];
}

function factWords(name: string, value: unknown): string {
  if (name.endsWith("_mb") && typeof value === "number") return bytes(value * (1 << 20));
  if (typeof value === "number") return count(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  const said = typeof value === "string" ? value : JSON.stringify(value);
  return cutText(said, LONGEST);
}
