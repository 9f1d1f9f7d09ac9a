/** Figures of two runs in a table: both values, their difference, and which run is better. */

import { difference, type Pair } from "../run/compare";
import { Card, Nothing } from "../ui/card";
import { digits, percent } from "../ui/format";

interface Kind {
  pairs: Pair[];
  shown: (value: number) => string;
  /** Words for B if it is better, and if it is worse. */
  words: [string, string];
}

interface FiguresProps extends Kind {
  title: string;
  about?: string;
  /** More rows below, in another unit. */
  more?: Kind;
  bars?: boolean;
  half?: boolean;
}

export function Figures({ title, about, more, bars = false, half = false, ...kind }: FiguresProps) {
  const kinds = more === undefined ? [kind] : [kind, more];
  const all = kinds.flatMap((one) => one.pairs);
  const most = Math.max(0, ...all.flatMap((pair) => [pair.one ?? 0, pair.two ?? 0]));
  return (
    <Card
      title={title}
      class={half ? "half" : ""}
      {...(about === undefined ? {} : { about })}
      csv={{
        name: `compare-${title.toLowerCase().replaceAll(" ", "-")}`,
        make: () => ({ columns: ["figure", "a", "b", "b_minus_a", "spread"], rows: all.map((pair) => [pair.name, pair.one, pair.two, difference(pair)?.by ?? null, pair.spread]) }),
      }}
    >
      {all.length === 0 ? (
        <Nothing>Neither run has steps to compare yet.</Nothing>
      ) : (
        <div class="scrolls">
          <table class="figures">
            <thead>
              <tr>
                <td />
                <th scope="col" class="number">
                  A
                </th>
                <th scope="col" class="number">
                  B
                </th>
                {bars && <td class="bars-head" />}
                <th scope="col">B vs. A</th>
              </tr>
            </thead>
            <tbody>
              {kinds.flatMap(({ pairs, shown, words }) =>
                pairs.map((pair) => (
                  <tr key={pair.name}>
                    <th scope="row">{pair.name}</th>
                    <td class="number">{pair.one === null ? "–" : shown(pair.one)}</td>
                    <td class="number">{pair.two === null ? "–" : shown(pair.two)}</td>
                    {bars && (
                      <td class="bars" aria-hidden="true">
                        <span class="bar-a" style={{ width: `${(100 * (pair.one ?? 0)) / (most || 1)}%` }} />
                        <span class="bar-b" style={{ width: `${(100 * (pair.two ?? 0)) / (most || 1)}%` }} />
                      </td>
                    )}
                    <td>
                      <InWords pair={pair} shown={shown} words={words} />
                    </td>
                  </tr>
                )),
              )}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

function InWords({ pair, shown, words }: { pair: Pair } & Pick<Kind, "shown" | "words">) {
  const found = difference(pair);
  if (found === null) return <span class="muted">–</span>;
  if (found.by === 0) return <span class="muted">the same</span>;
  const sign = found.by > 0 ? "+" : "−";
  const figures = `${sign}${shown(Math.abs(found.by))}${shareWords(found.share)}`;
  if (pair.unjudged !== undefined) {
    return (
      <span class="muted">
        {figures}
        {pair.unjudged && `, ${pair.unjudged}`}
      </span>
    );
  }
  if (found.winner === null) {
    return (
      <span class="muted" title={`Steps within a run vary by ±${shown(pair.spread ?? 0)}`}>
        ≈ {figures}, within the step-to-step spread
      </span>
    );
  }
  const better = found.winner === "two";
  return (
    <span class={better ? "better" : "worse"}>
      <span aria-hidden="true">{found.by < 0 ? "▼" : "▲"}</span> {figures} {better ? words[0] : words[1]}
    </span>
  );
}

/** From this share on, the difference is written as a factor. */
const MANY = 3;

function shareWords(share: number | null): string {
  if (share === null) return "";
  if (share >= MANY) return ` (${digits(1 + share)}×)`;
  return Math.abs(share) < 0.0005 ? " (under 0.1%)" : ` (${share > 0 ? "+" : "−"}${percent(Math.abs(share))})`;
}
