/** The screen for the current address, and what all screens share. */

import type { Source } from "./api/source";
import { route } from "./route";
import { CompareScreen } from "./screens/compare";
import { HelpDialog } from "./screens/help";
import { RunList } from "./screens/run-list";
import { RunScreen } from "./screens/run-screen";
import { Guard } from "./ui/guard";
import { Toast } from "./ui/toast";

export function App({ source }: { source: Source }) {
  return (
    <>
      <Guard>
        <Screen source={source} />
      </Guard>
      <HelpDialog />
      <Toast />
    </>
  );
}

function Screen({ source }: { source: Source }) {
  const { screen, runs } = route.value;
  const [one = "", two = ""] = runs;
  if (screen === "run") return <RunScreen key={one} source={source} name={one} />;
  if (screen === "compare") return <CompareScreen key={`${one}\n${two}`} source={source} one={one} two={two} />;
  return <RunList source={source} />;
}
