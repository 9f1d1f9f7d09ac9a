/** What may be done with the map: which figure, of a cell the worst or the mean, nearer and back, what dragging does. */

import type { Signal } from "@preact/signals";
import type { HeatControl } from "../charts/heat-control";
import type { Stat } from "../charts/heat-piece";
import { valueWords } from "../charts/heat-words";

interface HeatToolsProps {
  control: HeatControl;
  value: Signal<string>;
  stat: Signal<Stat>;
  choices: string[];
  /** Those of them that are times of the host where a device has its own. */
  hosts: string[];
}

export function HeatTools({ control, value, stat, choices, hosts }: HeatToolsProps) {
  const moves = control.mode.value === "move";
  return (
    <>
      <select
        aria-label="Which figure"
        value={value.value}
        onChange={(event) => {
          value.value = event.currentTarget.value;
        }}
      >
        {choices.map((choice) => (
          <option key={choice} value={choice}>
            {valueWords(choice)}
            {hosts.includes(choice) && " (host)"}
          </option>
        ))}
      </select>
      <select
        aria-label="Of several steps or ranks in a cell"
        value={stat.value}
        onChange={(event) => {
          stat.value = event.currentTarget.value === "mean" ? "mean" : "max";
        }}
      >
        <option value="max">highest</option>
        <option value="mean">mean</option>
      </select>
      <span class="heat-buttons" role="group" aria-label="Part of the map">
        <button type="button" title="Go back (−)" aria-label="Zoom out" onClick={() => control.zoom(2)} disabled={!control.near.value}>
          −
        </button>
        <button type="button" title="Come nearer (+)" aria-label="Zoom in" onClick={() => control.zoom(0.5)}>
          +
        </button>
        <button type="button" title="All ranks and steps (Home)" onClick={() => control.all()} disabled={!control.near.value}>
          All
        </button>
      </span>
      <button
        type="button"
        aria-pressed={moves}
        title="Dragging moves the map; else it chooses a stretch. Alt does the other."
        onClick={() => {
          control.mode.value = moves ? "choose" : "move";
        }}
      >
        Pan
      </button>
      <button type="button" aria-pressed={control.held.value} title="Keep what each colour means" onClick={() => control.hold(!control.held.value)}>
        Hold colours
      </button>
    </>
  );
}
