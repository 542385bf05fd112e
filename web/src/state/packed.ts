// A file's text in an address: deflated, in the letters that addresses may hold.

/** Characters of an address that programs still pass on. */
const MOST = 24_000;

/** Null where it is too long for an address. */
export async function pack(text: string): Promise<string | null> {
  const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  if (bytes.length * 1.4 > MOST) return null;
  let made = "";
  for (const byte of bytes) made += String.fromCharCode(byte);
  return btoa(made).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

/** The reverse; a link that was cut off or changed on its way is said to be broken. */
export async function unpack(packed: string): Promise<string> {
  try {
    const text = atob(packed.replace(/-/g, "+").replace(/_/g, "/"));
    const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    return await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"))).text();
  } catch {
    throw new Error("The link is broken: the file in it cannot be read. Copy the whole link, or open the file itself.");
  }
}
