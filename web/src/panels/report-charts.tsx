/** Charts of a report: stacked bars, many of them as columns, and curves over time. */

import uPlot from "uplot";
import type { BarsDocument, ColumnsDocument, CurvesDocument } from "../api/report-document";
import { closed, edges, stacked } from "../charts/columns";
import { BINARY, lineSeries } from "../charts/curves";
import type { Chart } from "../charts/plot-instance";
import { LineLegend } from "../charts/line-legend";
import { lookProperty } from "../charts/looks";
import { Plot } from "../charts/plot";
import type { Tip } from "../charts/tip";
import { Card } from "../ui/card";
import { bytes, count, duration, tick } from "../ui/format";
import { token } from "../ui/theme";
import "./report-charts.css";

export function LookLegend({ legend }: { legend: readonly [look: string, name: string][] }) {
  if (legend.length === 0) return null;
  return (
    <ul class="legend">
      {legend.map(([look, name]) => (
        <li key={look}>
          <span class="swatch" style={{ background: `var(${lookProperty(look)})` }} />
          {name}
        </li>
      ))}
    </ul>
  );
}

export function BarsCard({ bars }: { bars: BarsDocument }) {
  const longest = Math.max(...bars.rows.map((row) => row.parts.reduce((sum, [, value]) => sum + value, 0)), 0) || 1;
  return (
    <Card title={bars.title} about={bars.about}>
      <ul class="bar-list stacked" aria-label={bars.title}>
        {bars.rows.map((row) => (
          <li key={row.label}>
            <span class="bars-name">{row.label}</span>
            <span class="stacked-track">
              {row.parts.map(([look, value, title]) => (
                <span key={look} title={title} style={{ width: `${(value / longest) * 100}%`, background: `var(${lookProperty(look)})` }} />
              ))}
            </span>
            <span class="bars-value">
              {row.figure}
              {bars.legend.length > 1 && <span class="hidden">: {row.parts.map(([, , title]) => title).join("; ")}</span>}
            </span>
          </li>
        ))}
      </ul>
      <LookLegend legend={bars.legend} />
    </Card>
  );
}

export function ColumnsCard({ columns }: { columns: ColumnsDocument }) {
  const first = columns.numbers.at(0)?.[0] ?? 0;
  const last = columns.numbers.at(-1)?.[1] ?? 0;
  return (
    <Card title={columns.title} about={columns.about}>
      <Plot
        label={`${columns.title}: ${columns.axis} ${count(first)} to ${count(last)}`}
        height={190}
        make={() => columnsChart(columns)}
        deps={[columns]}
        tip={(at) => columnTip(columns, at)}
      />
      <LookLegend legend={columns.legend} />
    </Card>
  );
}

/** Each series is the sum up to its part; the highest is drawn first, so that only its own part stays visible. */
function columnsChart({ axis, numbers, values, legend }: ColumnsDocument): Chart {
  const looks = legend.map(([look]) => look);
  const sums = stacked(looks.map((look) => values[look] ?? []), numbers.length).reverse();
  const block = uPlot.paths.stepped?.({ align: 1 });
  const series: uPlot.Series[] = [{ label: axis }];
  for (const look of [...looks].reverse()) {
    const color = token(lookProperty(look));
    series.push({ label: look, stroke: color, fill: color, width: 0, points: { show: false }, ...(block === undefined ? {} : { paths: block }) });
  }
  return {
    blocks: true,
    options: { series, scales: { y: { range: (_plot, _least, most) => [0, most || 1] } }, axes: [{ label: axis }, { values: (_plot, ticks) => ticks.map((at) => tick(at, duration)) }] },
    data: [edges(numbers.map(([from]) => from), numbers.map(([, to]) => to)), ...sums.map(closed)] as uPlot.AlignedData,
  };
}

function columnTip({ axis, numbers, values, legend }: ColumnsDocument, at: number): Tip | null {
  const [first, last] = numbers[at] ?? [];
  if (first === undefined || last === undefined) return null;
  const rows = [...legend].reverse().flatMap(([look, name]) => {
    const value = values[look]?.[at] ?? 0;
    return value > 0 ? [{ name, value: duration(value), color: token(lookProperty(look)) }] : [];
  });
  const note = first === last ? {} : { note: "mean" };
  return { title: first === last ? `${axis} ${count(first)}` : `${axis}s ${count(first)}–${count(last)}`, rows, ...note };
}

export function CurvesCard({ curves }: { curves: CurvesDocument }) {
  const format = curves.unit === "bytes" ? bytes : count;
  const end = curves.times_ns.at(-1) ?? 0;
  return (
    <Card title={curves.title} about={curves.about}>
      <Plot
        label={`${curves.title}, over ${duration(end)}${curves.about === "" ? "" : `; ${curves.about}`}`}
        height={180}
        make={() => curvesChart(curves, format)}
        deps={[curves]}
        tip={(at) => curveTip(curves, at, format)}
      />
      {curves.lines.length > 1 && <LineLegend label={`Lines of ${curves.title}`} lines={curves.lines.map(([name], at) => ({ name, look: at }))} />}
    </Card>
  );
}

function curvesChart({ times_ns, lines, unit }: CurvesDocument, format: (value: number) => string): Chart {
  const hold = uPlot.paths.stepped?.({ align: 1 });
  return {
    options: {
      series: [{ label: "time" }, ...lines.map(([name], at) => ({ ...lineSeries(name, at), ...(hold === undefined ? {} : { paths: hold }) }))],
      scales: { y: { range: (_plot, _least, most) => [0, (most || 1) * 1.05] } },
      axes: [
        { label: "", labelSize: 0, values: (_plot, ticks) => ticks.map((at) => tick(at, duration)) },
        { values: (_plot, ticks) => ticks.map((at) => tick(at, format)), ...(unit === "bytes" ? { incrs: BINARY } : {}) },
      ],
    },
    data: [times_ns, ...lines.map(([, values]) => values)] as uPlot.AlignedData,
  };
}

function curveTip({ times_ns, lines }: CurvesDocument, at: number, format: (value: number) => string): Tip | null {
  const time = times_ns[at];
  if (time === undefined) return null;
  const rows = lines.flatMap(([name, values]) => (values[at] == null ? [] : [{ name, value: format(values[at]) }]));
  return { title: duration(time), rows };
}
