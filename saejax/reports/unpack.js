// The packed data that a page carries.

// base64 of gzip of JSON -> the table. Rejects with a plain Error where the browser cannot inflate.
async function unpack(base64) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser cannot unpack the feature data. Chrome 80, Firefox 113, Safari 16.4 or anything newer can.");
  }
  const packed = Uint8Array.from(atob(base64.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
