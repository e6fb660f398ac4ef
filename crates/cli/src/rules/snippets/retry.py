import @IMPORTS@

@KEY@
class NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *redirect):
        return None

@OPENER@

def seconds(wait):
    try:
        return int(wait[:9]) if wait.isdecimal() else email.utils.mktime_tz(email.utils.parsedate_tz(wait)) - time.time()
    except Exception:
        return 0  # neither seconds nor a date

def send():
    after, last = 0, None
    for pause in (0, 1, 2, 4, 8, 16):
        time.sleep(min(max(pause, after), 3600))
        after = 0
        request = urllib.request.Request(@URL@, method=@METHOD@, headers={
            @HEADERS@
        })
        @BODY@
        try:
            try:
                response = opener.open(request, timeout=60)
            except urllib.error.HTTPError as error:
                response = error
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            last = error  # no response, or not the whole of it
            continue
        status, headers = response.status, response.headers
        if 200 <= status < 300 or status == 303:
            return text
        @DECISION@
        if not again:
            raise RuntimeError(f"stopped with status {status}: {text}")
        after = seconds(headers.get("Retry-After", "0"))
    raise RuntimeError("the outcome is not known; run this again later@LATER@") from last

print(send())
