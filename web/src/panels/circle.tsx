/** A cycle of waiting ranks, drawn as a ring of arrows and as a list. */

const SIZE = 180;

/** `ring`: the ranks to draw; empty: only the list. */
export function Circle({ cycle, ring }: { cycle: readonly string[]; ring: readonly number[] }) {
  return (
    <div class="circle">
      {ring.length > 0 && <Ring ranks={ring} label={cycle.join("; ")} />}
      <ol class="plain-list">
        {cycle.slice(0, 24).map((line) => (
          <li key={line}>{line}</li>
        ))}
        {cycle.length > 24 && <li class="muted">and {cycle.length - 24} more</li>}
      </ol>
    </div>
  );
}

function Ring({ ranks, label }: { ranks: readonly number[]; label: string }) {
  const middle = SIZE / 2;
  const radius = middle - 26;
  const at = (place: number): [number, number] => {
    const angle = (place / ranks.length) * 2 * Math.PI - Math.PI / 2;
    return [middle + radius * Math.cos(angle), middle + radius * Math.sin(angle)];
  };
  // Arrows end before the disc of their target.
  const gap = 20 / radius;
  const arc = (place: number): string => {
    const step = (2 * Math.PI) / ranks.length;
    const from = place * step - Math.PI / 2 + gap;
    const to = (place + 1) * step - Math.PI / 2 - gap;
    const point = (angle: number): string => `${middle + radius * Math.cos(angle)} ${middle + radius * Math.sin(angle)}`;
    return `M ${point(from)} A ${radius} ${radius} 0 ${to - from > Math.PI ? 1 : 0} 1 ${point(to)}`;
  };
  return (
    <svg class="ring" viewBox={`0 0 ${SIZE} ${SIZE}`} role="img" aria-label={label}>
      <defs>
        <marker id="ring-arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">
          <path d="M0 0 L8 4 L0 8 z" />
        </marker>
      </defs>
      {ranks.map((rank, place) => (
        <path key={`to ${rank}`} class="ring-way" d={arc(place)} marker-end="url(#ring-arrow)" />
      ))}
      {ranks.map((rank, place) => {
        const [x, y] = at(place);
        return (
          <g key={rank}>
            <circle cx={x} cy={y} r="16" />
            <text x={x} y={y + 4.5} text-anchor="middle">
              {rank}
            </text>
          </g>
        );
      })}
    </svg>
  );
}
