/** The settings of two runs: those that differ, and how many are the same. */

import { ownWords, settingsDifference } from "../run/compare-settings";
import { settingsOf, type ComparedRun } from "../run/compared-run";
import { Card, Nothing } from "../ui/card";

export function CompareSettings({ pair: [one, two] }: { pair: [ComparedRun, ComparedRun] }) {
  const { differ, same } = settingsDifference(settingsOf(one), settingsOf(two));
  return (
    <Card
      title="Differences in setup"
      about="command, code, environment, versions and settings"
      csv={{ name: "compare-settings", make: () => ({ columns: ["setting", "a", "b"], rows: differ.map(({ name, one: a, two: b }) => [name, a, b]) }) }}
    >
      {differ.length === 0 ? (
        <Nothing>No known differences.</Nothing>
      ) : (
        <div class="scrolls">
          <table class="settings">
            <thead>
              <tr>
                <th scope="col">Setting</th>
                <th scope="col">A</th>
                <th scope="col">B</th>
              </tr>
            </thead>
            <tbody>
              {differ.map(({ name, one: a, two: b }) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td data-side="A">
                    <Value text={a} other={b} />
                  </td>
                  <td data-side="B">
                    <Value text={b} other={a} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {same.length > 0 && (
        <details class="same">
          <summary>Same in both: {same.length}</summary>
          <p class="muted">{same.join(", ")}</p>
        </details>
      )}
    </Card>
  );
}

/** In a long text, words that the other side lacks are marked. */
function Value({ text, other }: { text: string | null; other: string | null }) {
  if (text === null) return <span class="muted">not set</span>;
  const words = ownWords(text, other);
  if (words.length < 4) return <code>{text}</code>;
  return <code>{words.map(({ text: word, own }, at) => (own ? <mark key={at}>{word}</mark> : word))}</code>;
}
