/** A rank's identity, current state and settings. */

import type { RankDocument } from "../api/documents";
import { capital, clock, count, duration } from "../ui/format";
import { Evidence } from "./evidence";

/** The current state of a rank, in a sentence. */
export function stateWords(rank: RankDocument, nowWallNs: number): string {
  const now = rank.now as Partial<{ state: string; hang_state: string | null; live_phase: string | null; live_step: number; live_since_wall_ns: number; ended_wall_ns: number | null; last_step: number }>;
  const ended = now.ended_wall_ns;
  if (typeof ended === "number") {
    return `${capital(rank.state_text)} at ${clock(ended)}, after step ${count(now.last_step)}.`;
  }
  if (now.state !== "running") return now.state === "starting" ? "Starting; no step yet." : `State: ${now.state}.`;
  const since = now.live_since_wall_ns ?? 0;
  const long = since > 0 && nowWallNs > since ? ` for ${duration(nowWallNs - since)}` : "";
  if (now.hang_state) return `${capital(now.hang_state)}${now.live_phase ? `, in ${now.live_phase}` : ""}${long}, step ${count(now.live_step)}.`;
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

export function Facts({ sections }: { sections: RankDocument["facts_text"] }) {
  if (sections.length === 0) return <p class="muted">No settings recorded yet.</p>;
  return (
    <>
      {sections.map(({ title, rows }) => (
        <div key={title}>
          <h3>{title}</h3>
          <Evidence rows={rows} />
        </div>
      ))}
    </>
  );
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
