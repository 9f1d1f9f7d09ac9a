/** By phase, the slowest rank compared with the median rank, by the clock of the findings. */

import { useComputed } from "@preact/signals";
import type { RanksDocument, SummaryDocument } from "../api/documents";
import { PHASE_MEANING, phaseProperty } from "../charts/palette";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import { count, digits, duration, percent } from "../ui/format";
import { lastStepsWords } from "./last-steps";
import { onClock, pairs, pairsOfSummary, pairTable, rankTable, shares, shareTable, withHost, type DevicePair, type Pair, type Share } from "./rank-bars";
import { showRank } from "./rank-button";
import "./worst-median.css";

/** With more ranks, use the hub's summary: a response with every rank would be megabytes. */
const MOST_RANKS = 2048;
const NAMES: Record<string, string> = { wall: "whole step", work: "own work" };
const MEANINGS: Record<string, string> = { wall: "from the start of a step to the start of the next", work: "the step without the wait for others" };

export function WorstMedian({ run }: { run: OpenRun }) {
  const ready = useComputed(() => run.steps.value !== null).value;
  const device = run.onDevice.value;
  const many = (run.status.value?.ranks ?? 0) > MOST_RANKS;
  const ranks = useAnswer<RanksDocument>(run, many || !ready ? null : "ranks", { limit: MOST_RANKS }, 5000);
  const summary = useAnswer<SummaryDocument>(run, many && ready ? "summary" : null, { keys: "phases" }, 15_000);
  const failure = ranks.failure ?? summary.failure;
  const alone = !many && ranks.value !== null && ranks.value.total === 1 ? ranks.value : null;
  const found = many ? summary.value && pairsOn(device, (clock) => pairsOfSummary(summary.value?.summary ?? {}, clock)) : ranks.value && pairsOn(device, (clock) => pairs(onClock(ranks.value as RanksDocument, clock)));
  const parts = alone === null ? [] : sharesOn(alone, device);
  const clock = device ? "device time " : run.timed.value ? "host time " : "";
  return (
    <Card
      title={alone !== null ? "Where a step’s time goes" : found?.[0]?.otherRank === undefined ? "Worst vs. median rank" : "Worst vs. other rank"}
      about={`${clock}per step, ${many ? "from the summary" : lastStepsWords(run)}`}
      class="half"
      csv={{ name: `${run.name}-worst-median`, make: () => (alone === null ? pairTable(found ?? []) : device ? shareTable(parts as (Share & { host: number })[]) : rankTable(alone)) }}
    >
      {found === null ? (
        <Nothing>{failure === null ? "Loading the ranks …" : failure.message}</Nothing>
      ) : found.length === 0 ? (
        <Nothing>No rank has finished a step yet.</Nothing>
      ) : alone !== null ? (
        <Shares found={parts} />
      ) : (
        <Pairs run={run} found={found} />
      )}
    </Card>
  );
}

/** By the clock of the findings; on the device with the host's times next to them. */
function pairsOn(device: boolean, found: (device: boolean) => Pair[]): (Pair | DevicePair)[] {
  return device ? withHost(found(true), found(false)) : found(false);
}

function sharesOn(alone: RanksDocument, device: boolean): (Share & { host?: number })[] {
  const found = shares(onClock(alone, device));
  return device ? found.map((share) => ({ ...share, host: alone.mean_ns[share.name]?.[0] ?? 0 })) : found;
}

function Pairs({ run, found }: { run: OpenRun; found: readonly (Pair | DevicePair)[] }) {
  const most = Math.max(...found.map(({ worst }) => worst), 1);
  return (
    <table class="wm-pairs">
      <thead class="hidden">
        <tr>
          <th scope="col">Phase</th>
          <th scope="col">Worst and median rank</th>
          <th scope="col">Difference</th>
        </tr>
      </thead>
      <tbody>
        {found.map((pair) => (
          <tr key={pair.name} class={NAMES[pair.name] === undefined ? "" : "wm-whole"}>
            <th scope="row" title={MEANINGS[pair.name] ?? PHASE_MEANING[pair.name] ?? "user-defined phase"}>
              {NAMES[pair.name] ?? pair.name}
            </th>
            <td class="wm-wm-pair-bars">
              <Bar value={pair.worst} most={most} name={pair.name} kind="worst">
                <button
                  type="button"
                  class="rank-link"
                  aria-pressed={run.rank.value === pair.worstRank}
                  aria-label={`Show rank ${pair.worstRank}`}
                  onClick={() => showRank(run, pair.worstRank)}
                >
                  rank {count(pair.worstRank)}
                </button>{" "}
                {duration(pair.worst)}
              </Bar>
              <Bar value={pair.median} most={most} name={pair.name} kind="median">
                {pair.otherRank === undefined ? "median" : `rank ${pair.otherRank}`} {duration(pair.median)}
              </Bar>
            </td>
            <td class="wm-pair-words">
              <Difference run={run} pair={pair} step={most} />
              {"host" in pair && <span class="wm-host muted">host {duration(pair.host)}</span>}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** Smaller differences, as shares of the phase or of the step, are ignored. */
const ALIKE = 0.05;
const SMALL = 0.005;

function Difference({ run, pair, step }: { run: OpenRun; pair: Pair; step: number }) {
  const { median, worst, least, leastRank, otherRank } = pair;
  const usual = otherRank === undefined ? median : worst;
  if (least !== null && leastRank !== null && usual - least > ALIKE * Math.max(usual, step)) {
    return (
      <>
        rank{" "}
        <button type="button" class="rank-link" aria-label={`Show rank ${leastRank}, which waits least`} onClick={() => showRank(run, leastRank)}>
          {count(leastRank)}
        </button>{" "}
        waits least ({duration(least)}): {otherRank === undefined ? "the others wait" : "the other waits"} for it
      </>
    );
  }
  if (worst - median <= Math.max(ALIKE * median, SMALL * step)) return <span class="muted">all similar</span>;
  const times = median > 0 && worst / median >= 1.5 ? `, ${digits(worst / median)}×` : "";
  return (
    <>
      <strong>{duration(worst - median)}</strong> more{times}
    </>
  );
}

interface BarProps {
  value: number;
  most: number;
  name: string;
  kind: "worst" | "median";
  children: preact.ComponentChildren;
}

function Bar({ value, most, name, kind, children }: BarProps) {
  const color = NAMES[name] === undefined ? `var(${phaseProperty(name)})` : "var(--muted)";
  return (
    <div class="wm-pair-line">
      <span class={`wm-pair-bar ${kind}`} style={{ width: `${(value / most) * 100}%`, background: color }} />
      <span class="wm-pair-figure">{children}</span>
    </div>
  );
}

function Shares({ found }: { found: readonly (Share & { host?: number })[] }) {
  const timed = found.some(({ host }) => host !== undefined);
  return (
    <>
      <div class="wm-share-bar" aria-hidden="true">
        {found.map(({ name, share }) => (
          <span key={name} style={{ width: `${share * 100}%`, background: `var(${phaseProperty(name)})` }} />
        ))}
      </div>
      <table class="wm-shares">
        <thead class={timed ? "" : "hidden"}>
          <tr>
            <th scope="col">Phase</th>
            <th scope="col" class="number">
              {timed ? "Share" : "Share of the step"}
            </th>
            <th scope="col" class="number">
              {timed ? "On device" : "Time"}
            </th>
            {timed && (
              <th scope="col" class="number">
                Host
              </th>
            )}
          </tr>
        </thead>
        <tbody>
          {found.map(({ name, share, ns, host }) => (
            <tr key={name}>
              <th scope="row">
                <span class="swatch" style={{ background: `var(${phaseProperty(name)})` }} /> {name}
                <span class="muted"> {PHASE_MEANING[name] ?? ""}</span>
              </th>
              <td class="number">{percent(share)}</td>
              <td class="number">{duration(ns)}</td>
              {timed && <td class="number muted">{duration(host)}</td>}
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
