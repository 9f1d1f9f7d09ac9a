/** Ranks by cost, worst first, with a search by number. */

import { useSignal } from "@preact/signals";
import type { RanksDocument } from "../api/documents";
import { onDevice } from "../charts/heat-words";
import { ordered, phaseProperty } from "../charts/palette";
import { useAnswer, type OpenRun } from "../run/open-run";
import { Card, Nothing } from "../ui/card";
import { count, duration } from "../ui/format";
import { lastStepsWords } from "./last-steps";
import { onClock } from "./rank-bars";
import "./rank.css";

const SHOWN = 8;
const MORE = 100;

export function RankTable({ run }: { run: OpenRun }) {
  const wanted = useSignal("");
  const long = useSignal(false);
  const order = useSignal("work");
  const device = run.onDevice.value;
  const number = /^\d{1,9}$/.test(wanted.value.trim()) ? Number(wanted.value.trim()) : null;
  const limit = long.value ? MORE : SHOWN;
  const params = number === null ? { order: device ? onDevice(order.value) : order.value, limit } : { ranks: `${number}-${number}`, limit };
  const ranks = useAnswer<RanksDocument>(run, "ranks", params).value;
  const answer = ranks && onClock(ranks, device);
  const total = run.status.value?.ranks ?? 0;
  const phases = ordered(device ? Object.keys(run.steps.value?.device_mean_ns ?? {}) : (run.status.value?.phases ?? []));
  return (
    <Card
      title="Ranks by cost"
      about={`${device ? "device time, " : ""}${lastStepsWords(run)}`}
      tools={
        <>
          <select aria-label="Order by" value={order.value} onChange={(event) => (order.value = event.currentTarget.value)}>
            {["work", "wall", ...phases].map((name) => (
              <option key={name} value={name}>
                {name === "wall" ? "whole step" : name}
              </option>
            ))}
          </select>
          <input
            type="search"
            inputMode="numeric"
            placeholder="rank"
            aria-label="Find a rank by its number"
            class="rank-search"
            value={wanted.value}
            onInput={(event) => (wanted.value = event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && number !== null && (answer?.rank.length ?? 0) > 0) run.rank.value = number;
            }}
          />
        </>
      }
      csv={{
        name: `${run.name}-ranks-by-cost`,
        make: () =>
          answer && {
            columns: ["rank", "host", "pid", "state", "hang_state", "last_step", ...Object.keys(answer.mean_ns).map((name) => `${device ? "device_" : ""}${name}_mean_ns`)],
            rows: answer.rank.map((rank, at) => [
              rank,
              answer.host[at] ?? "",
              answer.pid[at] ?? null,
              answer.state[at] ?? "",
              answer.hang_state[at] ?? "",
              answer.last_step[at] ?? null,
              ...Object.values(answer.mean_ns).map((means) => means[at] ?? null),
            ]),
          },
      }}
    >
      {answer !== null && answer.rank.length === 0 && <Nothing>{number === null ? "No rank has completed a step yet." : `There is no rank ${number}.`}</Nothing>}
      {answer !== null && answer.rank.length > 0 && <Rows run={run} answer={answer} phases={phases} />}
      {number === null && total > SHOWN && (
        <button type="button" class="quiet" onClick={() => (long.value = !long.value)}>
          {long.value ? "Show fewer" : `Show more of ${count(total)}`}
        </button>
      )}
    </Card>
  );
}

function Rows({ run, answer, phases }: { run: OpenRun; answer: RanksDocument; phases: string[] }) {
  const most = Math.max(1, ...(answer.mean_ns["wall"] ?? []));
  const hosts = new Set(answer.host).size > 1 || (run.status.value?.ranks ?? 0) > answer.rank.length;
  return (
    <div class="scrolls rank-rows" tabIndex={0} role="region" aria-label="Table of ranks">
      <table>
        <thead>
          <tr>
            <th class="number">Rank</th>
            {hosts && <th>Host</th>}
            <th class="number">Work</th>
            <th class="number">Step</th>
            <th class="rank-bar-head">Phases{run.timed.value && (run.onDevice.value ? ", device time" : ", host time")}</th>
            <th>State</th>
          </tr>
        </thead>
        <tbody>
          {answer.rank.map((rank, at) => (
            <tr key={rank} class={run.rank.value === rank ? "chosen" : ""}>
              <td class="number">
                <button type="button" class="link" aria-pressed={run.rank.value === rank} aria-label={`Rank ${rank}`} onClick={() => (run.rank.value = rank)}>
                  {rank}
                </button>
              </td>
              {hosts && <td class="rank-host">{answer.host[at]}</td>}
              <td class="number">{duration(answer.mean_ns["work"]?.[at])}</td>
              <td class="number">{duration(answer.mean_ns["wall"]?.[at])}</td>
              <td>
                <span class="rank-bar" aria-hidden="true">
                  {phases.map((phase) => (
                    <span key={phase} title={phase} style={{ width: `${((answer.mean_ns[phase]?.[at] ?? 0) / most) * 100}%`, background: `var(${phaseProperty(phase)})` }} />
                  ))}
                </span>
              </td>
              <td>{answer.hang_state[at] ?? answer.state[at]}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
