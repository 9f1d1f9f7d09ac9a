/** Tools of the map: metric, maximum or mean per cell, zoom, drag mode. */

import type { Signal } from "@preact/signals";
import type { HeatControl } from "../charts/heat-control";
import type { Stat } from "../charts/heat-piece";
import { valueWords } from "../charts/heat-words";

interface HeatToolsProps {
  control: HeatControl;
  value: string;
  choose: (value: string) => void;
  stat: Signal<Stat>;
  choices: string[];
  /** Choices that are host times while the device is timed too. */
  hosts: string[];
}

export function HeatTools({ control, value, choose, stat, choices, hosts }: HeatToolsProps) {
  const moves = control.mode.value === "move";
  return (
    <>
      <select
        aria-label="Metric"
        value={value}
        onChange={(event) => {
          choose(event.currentTarget.value);
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
        aria-label="Aggregation within a cell"
        value={stat.value}
        onChange={(event) => {
          stat.value = event.currentTarget.value === "mean" ? "mean" : "max";
        }}
      >
        <option value="max">highest</option>
        <option value="mean">mean</option>
      </select>
      <span class="heat-buttons" role="group" aria-label="Zoom">
        <button type="button" title="Zoom out (−)" aria-label="Zoom out" onClick={() => control.zoom(2)} disabled={!control.near.value}>
          −
        </button>
        <button type="button" title="Zoom in (+)" aria-label="Zoom in" onClick={() => control.zoom(0.5)}>
          +
        </button>
        <button type="button" title="All ranks and steps (Home)" onClick={() => control.all()} disabled={!control.near.value}>
          All
        </button>
      </span>
      <button
        type="button"
        aria-pressed={moves}
        title="Drag to move the map instead of selecting a range. Alt switches to the other mode."
        onClick={() => {
          control.mode.value = moves ? "choose" : "move";
        }}
      >
        Pan
      </button>
      <button type="button" aria-pressed={control.held.value} title="Keep the current color scale" onClick={() => control.hold(!control.held.value)}>
        Lock colors
      </button>
    </>
  );
}
