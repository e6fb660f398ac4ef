@KEY@
async function send() {
  let after = 0, last;
  for (const pause of [0, 1, 2, 4, 8, 16]) {
    await new Promise((resume) => setTimeout(resume, 1000 * Math.min(Math.max(pause, after), 3600)));
    after = 0;
    let response, text;
    try {
      response = await fetch(@URL@, {
        @OPTIONS@
        redirect: "manual",
        signal: AbortSignal.timeout(60_000),
      });
      text = await response.text();
    } catch (error) {
      last = error; // no response, or not the whole of it
      continue;
    }
    const { status, headers } = response;
    if (response.ok || status === 303) return text;
    @DECISION@
    if (!again) throw new Error(`stopped with status ${status}: ${text}`);
    const wait = headers.get("Retry-After");
    after = Number(wait) || (Date.parse(wait) - Date.now()) / 1000 || 0;
  }
  throw new Error("the outcome is not known; run this again later@LATER@", { cause: last });
}

console.log(await send());
