/** A small chart of a few lines around a moment, drawn once: no axes but the lowest and highest value and the moment. */

import type { LineChart } from "../api/incident-documents";
import "./line-chart.css";

const WIDE = 360;
const HIGH = 88;
const TOP = 6;

export function LineChartView({ chart }: { chart: LineChart }) {
  const { at, series, low, high } = chart;
  const [first, last] = [at[0] ?? 0, at.at(-1) ?? 1];
  const onset = chart.onset ?? 0;
  const x = (value: number): number => ((value - first) / (last - first || 1)) * WIDE;
  const y = (value: number): number => TOP + (1 - (value - low) / (high - low || 1)) * (HIGH - 2 * TOP);
  return (
    <>
      <figcaption>{chart.title}</figcaption>
      <div class="line-chart">
        <span class="line-chart-high">{chart.high_text}</span>
        <span class="line-chart-low">{chart.low_text}</span>
        <svg viewBox={`0 0 ${WIDE} ${HIGH}`} preserveAspectRatio="none" role="img" aria-label={`${chart.title}, by ${chart.x}, from ${chart.low_text} to ${chart.high_text}`}>
          <line class="line-chart-onset" x1={x(onset)} x2={x(onset)} y1="0" y2={HIGH} />
          {series.map((line, index) => (
            <polyline key={line.name} class={index === 0 ? "line-a" : "line-b"} points={line.values.map((value, place) => `${x(at[place] ?? 0)},${y(value)}`).join(" ")} />
          ))}
        </svg>
      </div>
      <p class="line-chart-foot" aria-hidden="true">
        <span>
          {series.map((line, index) => (
            <span key={line.name} class="line-chart-name">
              <span class={`line-chart-swatch ${index === 0 ? "a" : "b"}`} />
              {line.name}
            </span>
          ))}
        </span>
        <span>
          {chart.x}: {first} to {last}
        </span>
      </p>
    </>
  );
}
