import { useState } from "preact/hooks";
import { sizeText } from "../draw/span.ts";
import type { Loader } from "../state/loader.ts";
import { readSize } from "../state/sizes.ts";
import { useStudio } from "../state/studio.ts";
import { Field } from "./fields.tsx";

/** The memory limit: a number, or a size like 40GiB. */
export function Limit({ loader }: { loader: Loader }) {
  const studio = useStudio();
  const limit = studio.limit.value;
  const [draft, setDraft] = useState<string | null>(null);
  const [wrong, setWrong] = useState(false);
  const given = studio.first.value?.memoryLimit ?? null;
  const usual = Array.isArray(given) ? "one per rank" : given === null ? "none" : sizeText(given, studio.first.value?.units.size ?? "");
  /** The text is the field's own, for what was typed last may not have been drawn yet. */
  const commit = (text: string): void => {
    const read = text.trim() === "" ? null : readSize(text);
    setWrong(read === undefined);
    if (read === undefined) return studio.say(`${text} is not a size: write a number, or one like 40GiB`, "error");
    setDraft(null);
    if (read === limit) return;
    studio.limit.value = read;
    const named = studio.choice.value;
    const info = studio.schedules.value.find((each) => each.name === named?.schedule);
    if (named && info?.options.some((option) => option.name === "memory_limit")) void loader.choose(named);
  };
  return (
    <Field label="Memory limit">
      <input
        value={draft ?? (limit === null ? "" : String(limit))}
        placeholder={usual}
        aria-invalid={wrong}
        onInput={(event) => setDraft(event.currentTarget.value)}
        onBlur={(event) => commit(event.currentTarget.value)}
        onKeyDown={(event) => event.key === "Enter" && commit(event.currentTarget.value)}
      />
    </Field>
  );
}
