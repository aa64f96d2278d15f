// Texts of tokens with spaces and line breaks that can be seen.

// Full-width bars and low lines are in few fonts.
export const visible = (string) => string.replaceAll("｜", "|").replaceAll("▁", "_").replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
